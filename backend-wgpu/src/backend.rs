//! The backend: memory and queues, and the ops handed to their files.

use std::sync::Arc;
use std::time::Duration;

use dropless_core::backend::{EventState, expert_ranks};
use dropless_core::exchange::Exchange;
use dropless_core::ops::{AllToAll, Attention, GroupQuantize, GroupedGemm, Map, Offload, Route};
use dropless_core::{
    Backend, Caps, Checked, DType, Error, Event, Memory, NumericModel, Queue, Result, Tensor, Timeouts, Timings,
};

use crate::device::Gpu;
use crate::dispatch::Stream;
use crate::ops::{attention, copy, group_quantize, grouped_gemm, map, route};
use crate::recording::Recorder;
use crate::{BACKEND, adapter, buffer, collective, host_memory};

/// How a [`Wgpu`] is opened.
#[derive(Clone, Debug)]
pub struct WgpuOptions {
    /// The arithmetic of the matrix products.
    pub numerics: NumericModel,
    /// The adapter's index or a part of its name; else the environment variable `DROPLESS_ADAPTER`, else the best one.
    pub adapter: Option<String>,
    /// Ranks that share one set of experts; all of them if None.
    pub expert_ranks: Option<usize>,
    /// How long a rank waits for the others in a collective before it fails.
    pub timeout: Duration,
    /// Writes down what one rank does.
    pub recorder: Option<Arc<Recorder>>,
    /// Changes the text of every shader before it is compiled, so that tests can show that a wrong one is noticed.
    #[doc(hidden)]
    pub shader_patch: Option<fn(String) -> String>,
}

impl Default for WgpuOptions {
    fn default() -> Self {
        WgpuOptions {
            numerics: NumericModel::Hopper,
            adapter: None,
            expert_ranks: None,
            timeout: Duration::from_secs(60),
            recorder: None,
            shader_patch: None,
        }
    }
}

/// A GPU, or a CPU driver of Vulkan, as a backend.
///
/// The three queues are one: work runs in the order of the calls. Two calls besides [`Backend::read`] and
/// [`Backend::wait`] can wait for the device: [`Backend::all_to_all`] with counts, which it compares between the ranks,
/// and [`Backend::offload`] to the device while the same bytes are still on their way to the host.
#[derive(Debug)]
pub struct Wgpu {
    caps: Caps,
    stream: Stream,
    exchange: Exchange,
}

/// One queue needs no memory of its points.
#[derive(Debug)]
struct InOrder;

impl EventState for InOrder {}

impl Wgpu {
    /// One rank.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is no such adapter, or it lacks what the shaders need.
    pub fn new(options: &WgpuOptions) -> Result<Wgpu> {
        Ok(Wgpu::ranks(1, options)?.remove(0))
    }

    /// `ranks` ranks in this process on one device, each to be driven by a thread of its own.
    ///
    /// # Errors
    /// As [`new`](Wgpu::new); [`Error::Argument`] when the ranks that share experts do not divide all ranks.
    pub fn ranks(ranks: usize, options: &WgpuOptions) -> Result<Vec<Wgpu>> {
        supports(options.numerics)?;
        if options.recorder.is_some() && ranks != 1 {
            let why = format!("one rank can be recorded, not {ranks}");
            return Err(Error::Unavailable { backend: BACKEND, why });
        }
        let adapter = adapter::choose(options.adapter.as_deref())?;
        let gpu = Gpu::open(&adapter, options.shader_patch, options.recorder.clone())?;
        let expert_ranks = expert_ranks(ranks, options.expert_ranks)?;
        let info = gpu.device.adapter_info();
        let device = format!("{} ({:?}, {} {})", info.name, info.backend, info.driver, info.driver_info);
        let caps = |rank| Caps {
            backend: BACKEND,
            device: device.clone(),
            numerics: options.numerics,
            rank,
            ranks,
            expert_ranks,
            max_buffer_bytes: gpu.max_buffer_bytes,
            peak_flops: None,
            timeouts: Timeouts::default(),
        };
        let caps: Vec<Caps> = (0..ranks).map(caps).collect();
        let exchanges = Exchange::ranks(&caps, options.timeout);
        let rank = |(caps, exchange)| Wgpu { caps, stream: Stream::new(gpu.clone()), exchange };
        Ok(caps.into_iter().zip(exchanges).map(rank).collect())
    }

    /// One rank on the same device, with another arithmetic of the matrix products.
    ///
    /// # Errors
    /// [`Error::Unavailable`] for one that is not among its shaders.
    pub fn with_numerics(&self, numerics: NumericModel) -> Result<Wgpu> {
        supports(numerics)?;
        let caps = Caps { numerics, rank: 0, ranks: 1, expert_ranks: 1, ..self.caps.clone() };
        let exchange = Exchange::ranks(std::slice::from_ref(&caps), Duration::from_secs(60)).swap_remove(0);
        Ok(Wgpu { caps, stream: Stream::new(self.stream.gpu.clone()), exchange })
    }

    /// The rank's commands.
    #[cfg(test)]
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Copies the words that hold the bytes of `tensor` to memory the host can map. Returns it, and where in it the
    /// bytes begin.
    fn stage(&self, op: &'static str, tensor: &Tensor) -> Result<(wgpu::Buffer, usize)> {
        let source = buffer::of(op, &self.stream.gpu, tensor)?;
        let bytes = buffer::range(tensor);
        let (first, last) = (bytes.start / 4 * 4, bytes.end.next_multiple_of(4));
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let staging = self.stream.gpu.buffer(op, last - first, usage)?;
        self.stream.encode(op, |encoder| {
            encoder.copy_buffer_to_buffer(&source.raw, first, &staging, 0, Some(last - first));
            if let Some(recorder) = self.stream.gpu.recorder.as_ref().filter(|_| last > first) {
                recorder.read(encoder, source, first, last - first);
            }
        })?;
        self.stream.flush(op)?;
        let begin = usize::try_from(bytes.start - first).expect("less than a word");
        Ok((staging, begin))
    }

    fn download(&self, op: &'static str, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        let (staging, begin) = self.stage(op, src)?;
        staging.slice(..).map_async(wgpu::MapMode::Read, |_| {});
        self.stream.gpu.wait(op)?;
        let failed = |e: wgpu::MapRangeError| Error::Device { backend: BACKEND, op, what: e.to_string() };
        let view = staging.slice(..).get_mapped_range().map_err(failed)?;
        bytes.copy_from_slice(&view[begin..begin + bytes.len()]);
        Ok(())
    }

    fn upload(&self, op: &'static str, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        let gpu = &self.stream.gpu;
        let target = buffer::of(op, gpu, dst)?;
        let range = buffer::range(dst);
        // Work that was queued before must not see the new bytes.
        self.stream.flush(op)?;
        let whole = range.end == target.bytes || range.end.is_multiple_of(4);
        if range.start.is_multiple_of(4) && whole {
            let (words, rest) = bytes.split_at(bytes.len() / 4 * 4);
            self.stream.write(op, target, range.start, words)?;
            if !rest.is_empty() {
                let mut last = [0; 4];
                last[..rest.len()].copy_from_slice(rest);
                self.stream.write(op, target, range.start + words.len() as u64, &last)?;
            }
            return gpu.check(op);
        }
        // Neighbours share a word with the view.
        let aligned = buffer::alloc(gpu, dst.dtype(), dst.shape())?;
        self.upload(op, &aligned, bytes)?;
        copy::run(&self.stream, op, &aligned, 0..bytes.len(), dst, 0)
    }
}

/// Refuses a model that no shader follows.
fn supports(numerics: NumericModel) -> Result<()> {
    if numerics == NumericModel::Blackwell {
        let why = "the Blackwell model is not among its shaders; use the host".into();
        return Err(Error::Unavailable { backend: BACKEND, why });
    }
    Ok(())
}

/// The bytes of a view within its host memory.
fn host_range(tensor: &Tensor) -> std::ops::Range<usize> {
    let start = tensor.offset() * tensor.dtype().size();
    start..start + tensor.bytes()
}

impl Backend for Wgpu {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        match memory {
            Memory::Device => buffer::alloc(&self.stream.gpu, dtype, shape),
            Memory::Host => host_memory::alloc(dtype, shape),
        }
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        const OP: &str = "write";
        dst.has_bytes(OP, bytes.len())?;
        match dst.memory() {
            Memory::Device => self.upload(OP, dst, bytes),
            Memory::Host => {
                let memory = host_memory::of(OP, dst)?;
                memory.settled(OP, &self.stream.gpu)?[host_range(dst)].copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        const OP: &str = "read";
        src.has_bytes(OP, bytes.len())?;
        match src.memory() {
            Memory::Device => self.download(OP, src, bytes),
            Memory::Host => {
                let memory = host_memory::of(OP, src)?;
                bytes.copy_from_slice(&memory.settled(OP, &self.stream.gpu)?[host_range(src)]);
                Ok(())
            }
        }
    }

    fn wait(&self) -> Result<()> {
        self.stream.flush("wait")?;
        self.stream.gpu.wait("wait")
    }

    fn timings(&self) -> Result<Option<Timings>> {
        Ok(None)
    }

    fn record(&self, _queue: Queue) -> Result<Event> {
        Ok(Event(Arc::new(InOrder)))
    }

    fn wait_for(&self, _queue: Queue, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn grouped_gemm(&self, op: &Checked<GroupedGemm<'_>>) -> Result<()> {
        grouped_gemm::run(&self.stream, op, self.caps.numerics)
    }

    fn group_quantize(&self, op: &Checked<GroupQuantize<'_>>) -> Result<()> {
        group_quantize::run(&self.stream, op)
    }

    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()> {
        let counts = |tensor: &Tensor| {
            let mut counts = vec![0u32; tensor.len()];
            self.download("all_to_all", tensor, bytemuck::cast_slice_mut(&mut counts))?;
            Ok(counts)
        };
        collective::run(&self.exchange, &self.stream, op, counts)
    }

    fn offload(&self, op: &Checked<Offload<'_>>) -> Result<()> {
        const OP: &str = "offload";
        match op.to.memory() {
            Memory::Host => {
                let memory = host_memory::of(OP, op.to)?;
                let (staging, begin) = self.stage(OP, op.from)?;
                memory.receive(staging, begin, host_range(op.to));
                Ok(())
            }
            Memory::Device => {
                let memory = host_memory::of(OP, op.from)?;
                let bytes = memory.settled(OP, &self.stream.gpu)?;
                self.upload(OP, op.to, &bytes[host_range(op.from)])
            }
        }
    }

    fn route(&self, op: &Checked<Route<'_>>) -> Result<()> {
        route::run(&self.stream, op)
    }

    fn attention(&self, op: &Checked<Attention<'_>>) -> Result<()> {
        attention::run(&self.stream, op, self.caps.numerics)
    }

    fn map(&self, op: &Checked<Map<'_>>) -> Result<()> {
        map::run(&self.stream, op)
    }
}

#[cfg(test)]
mod tests {
    use dropless_core::{Backend, DType, Error};

    use crate::WgpuOptions;

    #[test]
    fn b25a_a_lost_device_is_an_error_and_no_zeros() {
        let Some(wgpu) = crate::test_backend(&WgpuOptions::default()) else { return };
        let backend: &dyn Backend = &wgpu;
        let tensor = backend.upload(DType::F32, &[4], &[1f32; 4]).unwrap();
        assert_eq!(backend.download::<f32>(&tensor).unwrap(), [1.0; 4]);
        wgpu.stream().gpu.device.destroy();
        let read = backend.download::<f32>(&tensor);
        assert!(matches!(read, Err(Error::Device { .. })), "{read:?}");
    }
}
