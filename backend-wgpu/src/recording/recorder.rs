//! What a device is told to do, written down as it is told.

use std::collections::HashMap;
use std::sync::Arc;

use dropless_core::launch::Variant;
use dropless_core::{Error, Result, Tensor};
use parking_lot::Mutex;

use super::files::RecordingError;
use super::format::{
    Bound, FORMAT, Header, Load, Loss, Op, Pipeline, Program, Recording, Section, Span, Step, Tensor as Named, VERSION,
    Written,
};
use super::hash::{self, Hasher, Sums};
use crate::BACKEND;
use crate::buffer::{self, Buffer};
use crate::shader::recorded_source;

/// Writes down what one [`Wgpu`](crate::Wgpu) does: buffers, pipelines, dispatches and copies, and a hash of what each
/// wrote. It is given to the backend with its options.
#[derive(Debug, Default)]
pub struct Recorder {
    /// Words of an op's results that are kept beside their hash, at most.
    keep: u64,
    state: Mutex<State>,
}

/// Sums of this many parts lie in one buffer.
const CHUNK: u64 = 1 << 16;

#[derive(Debug, Default)]
struct State {
    device: Option<Device>,
    program: Program,
    contents: Vec<u32>,
    /// Where equal contents lie already.
    known: HashMap<(Sums, usize), u64>,
    shaders: HashMap<String, usize>,
    pipelines: HashMap<Variant, usize>,
    /// Parts in each buffer of sums.
    chunks: Vec<(wgpu::Buffer, u64)>,
    kept: Vec<Kept>,
    sections: Vec<Section>,
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Device {
    device: wgpu::Device,
    queue: wgpu::Queue,
    hasher: Hasher,
}

/// Results on their way to the host.
#[derive(Debug)]
struct Kept {
    op: usize,
    words: wgpu::Buffer,
}

/// A dispatch that was queued.
pub(crate) struct Dispatched<'a> {
    pub(crate) variant: &'a Variant,
    pub(crate) groups: [u32; 2],
    pub(crate) tensors: &'a [Option<&'a Tensor>],
    pub(crate) given: &'a [u32],
}

impl Recorder {
    /// Keeps hashes only.
    pub fn new() -> Arc<Recorder> {
        Arc::default()
    }

    /// Keeps what a dispatch wrote, too, where it is no more than so many words: whoever replays it can then say what
    /// was expected.
    pub fn keeping(words: u64) -> Arc<Recorder> {
        Arc::new(Recorder { keep: words, ..Recorder::default() })
    }

    /// What follows belongs to a section of this name.
    pub fn section(&self, name: &str) {
        self.state.lock().sections.push(Section { name: name.to_owned(), ops: 0 });
    }

    /// The places of the ops that have read something back so far.
    pub fn reads(&self) -> Vec<usize> {
        let state = self.state.lock();
        let reads = state.program.ops.iter().enumerate().filter(|(_, op)| matches!(op, Op::Read { .. }));
        reads.map(|(at, _)| at).collect()
    }

    /// A training step ended, whose results were read back by ops: the sums of the losses of `shards`, times `scale`, are
    /// the loss `value`; `load` are the counts of so many experts.
    pub fn step(&self, sums: usize, shards: usize, scale: f32, value: f32, load: &[(usize, usize)]) {
        let loss = Loss { read: sums, shards, scale: scale.to_bits(), value: value.to_bits() };
        let load = load.iter().map(|&(read, experts)| Load { read, experts }).collect();
        self.state.lock().steps.push(Step { loss, load });
    }

    /// The recording of all that was queued, when it is done; `state` is the digest of what was trained.
    ///
    /// # Errors
    /// A failure of the device, or nothing that was recorded.
    pub fn finish(
        &self,
        program: &str,
        title: &str,
        on: &str,
        state: Option<String>,
    ) -> std::result::Result<Recording, RecordingError> {
        let mut own = self.state.lock();
        let Some(Device { device, queue, .. }) = own.device.take() else {
            return Err(Error::Unavailable { backend: BACKEND, why: "nothing was recorded".into() }.into());
        };
        let download = |from: &wgpu::Buffer, bytes: u64| download(&device, &queue, from, bytes);
        let mut sums: Vec<Sums> = Vec::new();
        for (chunk, parts) in &own.chunks {
            let words = download(chunk, parts * 8)?;
            sums.extend(words.as_chunks::<2>().0);
        }
        for Kept { op, words } in std::mem::take(&mut own.kept) {
            let words = download(&words, words.size())?;
            let place = own.hold(&words);
            if let Op::Run { kept, .. } = &mut own.program.ops[op] {
                *kept = Some(place);
            }
        }
        let State { program: mut all, contents, sections, steps, .. } = std::mem::take(&mut *own);
        all.hash = hash::SHADER.to_owned();
        let header = Header {
            format: FORMAT.into(),
            version: VERSION,
            program: program.into(),
            title: title.into(),
            device: on.into(),
            digest: hash::digest(&all.ops, &sums),
            state,
            ops: all.ops.len(),
            pipelines: all.pipelines.len(),
            needs: Recording::needs(&all),
            bytes: super::format::FileBytes::default(),
            sections,
            steps,
        };
        Ok(Recording { header, program: all, contents, sums })
    }

    /// Takes the device that the ops run on.
    pub(crate) fn attach(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<()> {
        let mut state = self.state.lock();
        if state.device.is_some() {
            return Err(Error::Unavailable { backend: BACKEND, why: "a recorder is for one device".into() });
        }
        state.device = Some(Device { device: device.clone(), queue: queue.clone(), hasher: Hasher::new(device) });
        Ok(())
    }

    /// The number of a new buffer.
    pub(crate) fn buffer(&self, bytes: u64) -> usize {
        let buffers = &mut self.state.lock().program.buffers;
        buffers.push(bytes);
        buffers.len() - 1
    }

    /// The host writes whole words to a buffer.
    pub(crate) fn write(&self, encoder: &mut wgpu::CommandEncoder, to: &Buffer, offset: u64, bytes: &[u8]) {
        let words: Vec<u32> = bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
        let mut state = self.state.lock();
        let contents = state.hold(&words);
        let span = span(to, offset, bytes.len() as u64);
        state.queued(encoder, Op::Write { to: span, contents }, &[hashed(to, span)]);
    }

    /// Whole words go from one buffer to another.
    pub(crate) fn copy(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        from: (&Buffer, u64),
        to: (&Buffer, u64),
        bytes: u64,
    ) {
        let (source, target) = (span(from.0, from.1, bytes), span(to.0, to.1, bytes));
        self.state.lock().queued(encoder, Op::Copy { from: source, to: target }, &[hashed(to.0, target)]);
    }

    /// Whole words are read back.
    pub(crate) fn read(&self, encoder: &mut wgpu::CommandEncoder, from: &Buffer, offset: u64, bytes: u64) {
        let span = span(from, offset, bytes);
        self.state.lock().queued(encoder, Op::Read { from: span }, &[hashed(from, span)]);
    }

    /// A shader runs.
    pub(crate) fn run(&self, encoder: &mut wgpu::CommandEncoder, run: &Dispatched<'_>) {
        let Dispatched { variant, groups, tensors, given } = *run;
        let mut state = self.state.lock();
        let pipeline = state.pipeline(variant, given.len());
        let (mut bind, mut writes, mut spans) = (Vec::new(), Vec::new(), Vec::new());
        for (binding, (declared, tensor)) in variant.program.tensors.iter().zip(tensors).enumerate() {
            let Some((tensor, storage)) = tensor.and_then(|tensor| Some((tensor, tensor.storage::<Buffer>()?))) else {
                bind.push(None);
                continue;
            };
            let part = buffer::bound(storage, tensor);
            bind.push(Some(Bound { buffer: storage.recorded, offset: part.start, size: part.end - part.start }));
            let bytes = buffer::range(tensor);
            if !declared.access.reads_only() && !bytes.is_empty() {
                let (first, last) = (bytes.start / 4 * 4, bytes.end.next_multiple_of(4));
                let span = span(storage, first, last - first);
                writes.push(Written { binding, span });
                spans.push(hashed(storage, span));
            }
        }
        let words: u64 = spans.iter().map(|span| span.words).sum();
        let op = Op::Run { pipeline, groups, bind, given: given.to_vec(), writes, kept: None };
        state.queued(encoder, op, &spans);
        if words > 0 && words <= self.keep {
            state.keep(encoder, &spans, words);
        }
    }
}

/// Whole words of a buffer.
fn span(buffer: &Buffer, offset: u64, bytes: u64) -> Span {
    Span { buffer: buffer.recorded, first: offset / 4, words: bytes / 4 }
}

/// The same for the hash.
fn hashed(buffer: &Buffer, span: Span) -> hash::Span<'_> {
    hash::Span { buffer: &buffer.raw, first: span.first, words: span.words }
}

impl State {
    /// The place of these words among the contents.
    fn hold(&mut self, words: &[u32]) -> u64 {
        let key = (hash::of(words.iter().copied()), words.len());
        if let Some(&place) = self.known.get(&key) {
            let from = usize::try_from(place).expect("it lies in memory");
            if self.contents[from..from + words.len()] == *words {
                return place;
            }
        }
        let place = self.contents.len() as u64;
        self.known.insert(key, place);
        self.contents.extend(words);
        place
    }

    fn pipeline(&mut self, variant: &Variant, given: usize) -> usize {
        if let Some(known) = self.pipelines.get(variant) {
            return *known;
        }
        let text = recorded_source(variant);
        let shader = *self.shaders.entry(text.clone()).or_insert(self.program.shaders.len());
        if shader == self.program.shaders.len() {
            self.program.shaders.push(text);
        }
        let named = |(binding, dtype): (&dropless_core::launch::Binding, Option<dropless_core::DType>)| Named {
            name: binding.name.to_owned(),
            element: dtype.map_or(String::new(), |dtype| format!("{dtype:?}").to_lowercase()),
            writes: !binding.access.reads_only(),
        };
        let bindings = variant.tensors().map(named).collect();
        let name = variant.program.name.to_owned();
        self.program.pipelines.push(Pipeline { name, shader, bindings, given });
        let place = self.program.pipelines.len() - 1;
        self.pipelines.insert(*variant, place);
        place
    }

    /// Takes down an op and queues the hash of what it wrote.
    fn queued(&mut self, encoder: &mut wgpu::CommandEncoder, op: Op, spans: &[hash::Span<'_>]) {
        let parts = hash::parts(op.words());
        self.program.ops.push(op);
        match self.sections.last_mut() {
            Some(section) => section.ops += 1,
            None => self.sections.push(Section { name: "start".into(), ops: 1 }),
        }
        let Some(Device { hasher, .. }) = &self.device else { return };
        let full = self.chunks.last().is_none_or(|(_, used)| used + parts > CHUNK);
        if full {
            self.chunks.push((hasher.sums(CHUNK), 0));
        }
        if let Some((sums, used)) = self.chunks.last_mut() {
            hasher.encode(encoder, spans, sums, *used);
            *used += parts;
        }
    }

    /// Copies what the last op wrote, for the end.
    fn keep(&mut self, encoder: &mut wgpu::CommandEncoder, spans: &[hash::Span<'_>], words: u64) {
        let Some(Device { device, .. }) = &self.device else { return };
        let copy = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("kept"),
            size: words * 4,
            usage: wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut at = 0;
        for span in spans {
            let bytes = span.words * 4;
            encoder.copy_buffer_to_buffer(span.buffer, span.first * 4, &copy, at, Some(bytes));
            at += bytes;
        }
        self.kept.push(Kept { op: self.program.ops.len() - 1, words: copy });
    }
}

/// The words of a buffer.
pub(super) fn download(
    device: &wgpu::Device,
    queue: &wgpu::Queue,
    from: &wgpu::Buffer,
    bytes: u64,
) -> Result<Vec<u32>> {
    if bytes == 0 {
        return Ok(Vec::new());
    }
    let failed = |what: String| Error::Device { backend: BACKEND, op: "recording", what };
    let staging = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("recording"),
        size: bytes,
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    encoder.copy_buffer_to_buffer(from, 0, &staging, 0, Some(bytes));
    queue.submit([encoder.finish()]);
    staging.slice(..).map_async(wgpu::MapMode::Read, |_| {});
    device.poll(wgpu::PollType::wait_indefinitely()).map_err(|e| failed(e.to_string()))?;
    let view = staging.slice(..).get_mapped_range().map_err(|e| failed(e.to_string()))?;
    Ok(view.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect())
}
