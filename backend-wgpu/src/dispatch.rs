//! One rank's work: dispatches and copies in the order of the calls, handed to the device in batches.

use std::sync::Arc;

use dropless_core::{Error, Result, Tensor};
use parking_lot::Mutex;

use crate::BACKEND;
use crate::buffer::{self, Buffer};
use crate::device::{Gpu, UNIT};
use crate::recording::Dispatched;
use crate::shader::{ABSENT, OFFSET_WORDS, Scalars, Shader, Variant};

/// Commands of a batch: the device works on one while the next is written.
const BATCH: usize = 64;

/// Work that is written and not yet handed over.
#[derive(Debug, Default)]
struct Batch {
    encoder: Option<wgpu::CommandEncoder>,
    commands: usize,
}

/// A rank's commands.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) gpu: Arc<Gpu>,
    batch: Mutex<Batch>,
}

/// One run of a shader.
#[derive(Debug)]
pub(crate) struct Dispatch<'a, S: Scalars> {
    pub(crate) shader: &'static Shader<S>,
    pub(crate) scalars: S,
    /// One for each tensor of the shader.
    pub(crate) tensors: &'a [Option<&'a Tensor>],
    /// One for each constant of the shader.
    pub(crate) constants: &'a [u32],
    pub(crate) workgroups: usize,
}

impl<'a, S: Scalars> Dispatch<'a, S> {
    /// Without constants.
    pub(crate) fn new(
        shader: &'static Shader<S>,
        scalars: S,
        tensors: &'a [Option<&'a Tensor>],
        workgroups: usize,
    ) -> Dispatch<'a, S> {
        Dispatch { shader, scalars, tensors, constants: &[], workgroups }
    }
}

impl Stream {
    pub(crate) fn new(gpu: Arc<Gpu>) -> Self {
        Stream { gpu, batch: Mutex::default() }
    }

    /// Writes commands; `op` names them in errors.
    pub(crate) fn encode(&self, op: &'static str, write: impl FnOnce(&mut wgpu::CommandEncoder)) -> Result<()> {
        let mut batch = self.batch.lock();
        let descriptor = wgpu::CommandEncoderDescriptor { label: Some(op) };
        write(batch.encoder.get_or_insert_with(|| self.gpu.device.create_command_encoder(&descriptor)));
        batch.commands += 1;
        if batch.commands >= BATCH { self.submit(&mut batch, op) } else { Ok(()) }
    }

    /// Writes whole words from the host to a buffer. What was queued before has been handed over.
    pub(crate) fn write(&self, op: &'static str, to: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        self.gpu.queue.write_buffer(&to.raw, offset, bytes);
        match &self.gpu.recorder {
            Some(recorder) if !bytes.is_empty() => {
                self.encode(op, |encoder| recorder.write(encoder, to, offset, bytes))
            }
            _ => Ok(()),
        }
    }

    /// Queues a copy of whole words between two buffers.
    pub(crate) fn copy(&self, op: &'static str, from: (&Buffer, u64), to: (&Buffer, u64), bytes: u64) -> Result<()> {
        self.encode(op, |encoder| {
            encoder.copy_buffer_to_buffer(&from.0.raw, from.1, &to.0.raw, to.1, Some(bytes));
            if let Some(recorder) = &self.gpu.recorder {
                recorder.copy(encoder, from, to, bytes);
            }
        })
    }

    /// Hands over what is written.
    pub(crate) fn flush(&self, op: &'static str) -> Result<()> {
        self.submit(&mut self.batch.lock(), op)
    }

    fn submit(&self, batch: &mut Batch, op: &'static str) -> Result<()> {
        batch.commands = 0;
        if let Some(encoder) = batch.encoder.take() {
            self.gpu.queue.submit([encoder.finish()]);
        }
        self.gpu.check(op)
    }

    /// Queues a run of a shader. No workgroups: nothing to do.
    ///
    /// # Panics
    /// When the shader declares other tensors or constants.
    pub(crate) fn dispatch<S: Scalars>(&self, run: Dispatch<'_, S>) -> Result<()> {
        let Dispatch { shader, scalars, tensors, constants, workgroups } = run;
        let program = &shader.program;
        let op = program.name;
        // A shader learns at run time what is absent.
        let variant = Variant::of(program, tensors, constants).complete();
        if workgroups == 0 {
            return Ok(());
        }
        let [x, y] = fold(workgroups as u64, self.gpu.max_workgroups).ok_or_else(|| Error::Device {
            backend: BACKEND,
            op,
            what: format!("needs {workgroups} workgroups, but the adapter takes {}^2 at once", self.gpu.max_workgroups),
        })?;
        let (pipeline, fresh) = self.gpu.pipeline(&variant)?;

        let mut given = vec![0; OFFSET_WORDS];
        let mut entries = Vec::new();
        for (slot, (binding, tensor)) in (0..).zip(program.tensors.iter().zip(tensors)) {
            let (first, resource) = match tensor {
                None => (ABSENT, self.gpu.nothing(binding.access.reads_only()).as_entire_binding()),
                Some(tensor) => {
                    let storage = buffer::of(op, &self.gpu, tensor)?;
                    let bound = buffer::bound(storage, tensor);
                    let elements = (buffer::range(tensor).start - bound.start) / tensor.dtype().size() as u64;
                    let part = wgpu::BufferBinding {
                        buffer: &storage.raw,
                        offset: bound.start,
                        size: wgpu::BufferSize::new(bound.end - bound.start),
                    };
                    let first = u32::try_from(elements).expect("less than the alignment");
                    (first, wgpu::BindingResource::Buffer(part))
                }
            };
            given[entries.len()] = first;
            entries.push(wgpu::BindGroupEntry { binding: slot, resource });
        }
        given.extend(scalars.words());
        given.resize(given.len().next_multiple_of(UNIT / size_of::<u32>()), 0);
        let descriptor = wgpu::BindGroupDescriptor { label: Some(op), layout: &pipeline.layout, entries: &entries };
        let group = self.gpu.device.create_bind_group(&descriptor);
        self.encode(op, |encoder| {
            let mut pass =
                encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some(op), ..Default::default() });
            pass.set_pipeline(&pipeline.raw);
            pass.set_bind_group(0, &group, &[]);
            pass.set_immediates(0, bytemuck::cast_slice(&given));
            pass.dispatch_workgroups(x, y, 1);
            drop(pass);
            if let Some(recorder) = &self.gpu.recorder {
                recorder.run(encoder, &Dispatched { variant: &variant, groups: [x, y], tensors, given: &given });
            }
        })?;
        // Drivers compile when a pipeline first runs; meanwhile the next one is made.
        if fresh { self.flush(op) } else { Ok(()) }
    }
}

/// Workgroups along x and y, at least `count` in all: one dimension holds no more than `limit`. None when two do not
/// suffice.
fn fold(count: u64, limit: u32) -> Option<[u32; 2]> {
    let y = count.div_ceil(u64::from(limit));
    let x = count.div_ceil(y);
    Some([u32::try_from(x).ok()?, u32::try_from(y).ok().filter(|&y| y <= limit)?])
}

#[cfg(test)]
mod tests {
    use super::fold;

    #[test]
    fn workgroups_past_one_dimension_are_folded() {
        assert_eq!(fold(1, 65535), Some([1, 1]));
        assert_eq!(fold(65535, 65535), Some([65535, 1]));
        assert_eq!(fold(65536, 65535), Some([32768, 2]));
        assert_eq!(fold(1_000_003, 65535), Some([62501, 16]));
        assert_eq!(fold(65535 * 65535, 65535), Some([65535, 65535]));
        assert_eq!(fold(65535 * 65535 + 1, 65535), None);
    }
}
