//! Where the time of some work goes, a training step as a rule: [`Traced`] stands around a backend as long as somebody
//! wants to know, writes down each call with what it does, and gives a [`Trace`] in the end.
//!
//! Its tensors are those of the backend inside, so a trace begins and ends while they live, and whoever is not traced pays
//! nothing. Every op goes to that backend as it came: the bits are the same.
//!
//! A device that times its launches ([`LaunchClock`]) does so while the trace goes on, and nobody waits for it before the
//! end. On other backends each op is waited for, and its time is that of its call: [`Measured`] says which.

use std::fmt::Debug;
use std::ops::Range;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::backend::{Backend, Caps, Event, Group, Queue, Timings};
use crate::error::{Error, Result};
use crate::ops::{
    Access, AllToAll, Attention, AttentionShape, Checked, GemmKind, GroupQuantize, GroupedGemm, Map, Offload, Op, Route,
};
use crate::tensor::{DType, Memory, Tensor};

/// A device's own time of what runs on its queues.
pub trait LaunchClock: Debug + Send + Sync {
    /// Begins to time launches, when the device has done its work so far. Returns the moment from which they count. What an
    /// earlier start has timed is forgotten.
    ///
    /// # Errors
    /// A failure of the device.
    fn start(&self) -> Result<Instant>;

    /// Launches that were queued since the start.
    fn queued(&self) -> usize;

    /// Waits for the device and ends the timing. Returns the launches since the start, in the order in which they were queued;
    /// those of a queue follow one another in time.
    ///
    /// # Errors
    /// A failure of the device.
    fn stop(&self) -> Result<Vec<Launch>>;
}

/// From the beginning of the trace on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// When it began.
    pub begin: Duration,
    /// When it ended.
    pub end: Duration,
}

impl Interval {
    /// How long it is.
    pub fn length(&self) -> Duration {
        self.end.saturating_sub(self.begin)
    }
}

/// A kernel, a copy or a transfer that ran on a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel's name; `copy`, `fill` or `nccl` where it is none.
    pub name: &'static str,
    /// The queue.
    pub queue: Queue,
    /// When it ran.
    pub time: Interval,
}

/// What the times on the queues are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measured {
    /// The device's own, of every launch.
    Launches,
    /// Those of the calls, each of which was waited for.
    Calls,
}

/// What the host did for some time: a part of the program, or a call of the backend in it.
#[derive(Clone, Debug)]
pub struct Span {
    /// The part, or the op; `read`, `write` and `wait` of the backend.
    pub name: &'static str,
    /// Which of several such parts: the layer.
    pub index: Option<usize>,
    /// When the host was at it. A call that is not waited for ends when the work is queued.
    pub time: Interval,
    /// The part that it belongs to, by its place among the spans.
    pub within: Option<usize>,
    /// Of a call, what it does.
    pub call: Option<Call>,
}

/// What a call of the backend does.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// Where its work is queued, if it is an op.
    pub queue: Option<Queue>,
    /// Which product, exchange or copy.
    pub kind: Option<&'static str>,
    /// Its tensors: field, element type and shape.
    pub tensors: Vec<(String, String)>,
    /// Bytes of its tensors, each read or written once, and what is updated in place twice: all rows that there is room for,
    /// of a table that is gathered from, or added to by index, those that are named.
    pub bytes: usize,
    /// Floating-point operations of a product ([`GroupedGemm::flops`]) or an attention ([`AttentionShape::flops`]).
    pub flops: Option<f64>,
    /// Its launches, by their places among them.
    pub launches: Range<usize>,
}

/// What [`Traced`] saw.
#[derive(Clone, Debug)]
pub struct Trace {
    /// What the times on the queues are.
    pub measured: Measured,
    /// What the host did, in the order in which it began.
    pub spans: Vec<Span>,
    /// What ran on the queues, in the order in which it was queued, if the device times it.
    pub launches: Vec<Launch>,
    /// From the beginning until all work was done.
    pub length: Duration,
}

impl Trace {
    /// When the work of a call was on which queues.
    pub fn on_queues(&self, span: &Span) -> Vec<(Queue, Interval)> {
        let Some(call) = &span.call else { return Vec::new() };
        if self.measured == Measured::Calls {
            return call.queue.map(|queue| (queue, span.time)).into_iter().collect();
        }
        let mut work: Vec<(Queue, Interval)> = Vec::new();
        for launch in &self.launches[call.launches.clone()] {
            match work.iter_mut().find(|(queue, _)| *queue == launch.queue) {
                Some((_, time)) => time.end = launch.time.end,
                None => work.push((launch.queue, launch.time)),
            }
        }
        work
    }

    /// The parts that a span belongs to, the innermost first.
    pub fn parts(&self, span: &Span) -> impl Iterator<Item = &Span> {
        let parent = |span: &Span| span.within.map(|at| &self.spans[at]);
        std::iter::successors(parent(span), move |part| parent(part))
    }
}

/// Where [`Traced`] writes down what the host does.
#[derive(Debug)]
pub struct Log {
    origin: Instant,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    spans: Vec<Span>,
    /// The parts that have begun and not ended, the innermost last.
    open: Vec<usize>,
    /// Arithmetic that depends on what lies on the device, of the spans at these places.
    arithmetic: Vec<(usize, Arithmetic)>,
}

impl Log {
    fn begin(&self, name: &'static str, index: Option<usize>, call: Option<Call>) -> usize {
        let begin = self.origin.elapsed();
        let mut entries = self.entries.lock();
        let (at, within) = (entries.spans.len(), entries.open.last().copied());
        entries.open.push(at);
        entries.spans.push(Span { name, index, time: Interval { begin, end: begin }, within, call });
        at
    }

    fn end(&self, at: usize) {
        let end = self.origin.elapsed();
        let mut entries = self.entries.lock();
        entries.open.retain(|&open| open != at);
        entries.spans[at].time.end = end;
    }
}

/// A part of the program, as long as this lives; see `scope` of `dyn Backend`.
#[derive(Debug)]
#[must_use = "a part lasts as long as this lives"]
pub struct Scope<'a>(Option<(&'a Log, usize)>);

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        if let Some((log, at)) = self.0 {
            log.end(at);
        }
    }
}

impl dyn Backend + '_ {
    /// What is called from now on until the returned value goes belongs to this part of the program. Says nothing to anyone
    /// but a trace.
    pub fn scope(&self, name: &'static str, index: Option<usize>) -> Scope<'_> {
        Scope(self.log().map(|log| (log, log.begin(name, index, None))))
    }
}

/// A backend whose calls are written down. See the module.
#[derive(Debug)]
pub struct Traced<'a> {
    inner: &'a dyn Backend,
    clock: Option<&'a dyn LaunchClock>,
    log: Log,
}

impl<'a> Traced<'a> {
    /// Begins a trace, when the work so far is done.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn begin(inner: &'a dyn Backend) -> Result<Traced<'a>> {
        inner.wait()?;
        let clock = inner.launch_clock();
        let origin = clock.map_or_else(|| Ok(Instant::now()), LaunchClock::start)?;
        Ok(Traced { inner, clock, log: Log { origin, entries: Mutex::default() } })
    }

    /// Waits for the work, and ends the trace.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn end(self) -> Result<Trace> {
        self.inner.wait()?;
        let length = self.log.origin.elapsed();
        let (measured, launches) = match self.clock {
            Some(clock) => (Measured::Launches, clock.stop()?),
            None => (Measured::Calls, Vec::new()),
        };
        let Entries { mut spans, arithmetic, .. } = self.log.entries.into_inner();
        let mut known = Known { backend: self.inner, tensors: Vec::new() };
        for (at, arithmetic) in arithmetic {
            let flops = arithmetic.count(&mut known)?;
            if let Some(call) = &mut spans[at].call {
                call.flops = Some(flops);
            }
        }
        if let Some(lost) = spans.iter().filter_map(|span| span.call.as_ref()).find(|c| c.launches.end > launches.len())
        {
            let what = format!("{} launches were timed, expected at least {}", launches.len(), lost.launches.end);
            return Err(Error::Device { backend: self.inner.caps().backend, op: "trace", what });
        }
        Ok(Trace { measured, spans, launches, length })
    }

    fn queued(&self) -> usize {
        self.clock.map_or(0, LaunchClock::queued)
    }

    /// Carries out a call and writes it down.
    fn note<R>(&self, name: &'static str, call: Call, work: impl FnOnce() -> Result<R>) -> Result<(usize, R)> {
        let first = self.queued();
        let at = self.log.begin(name, None, Some(call));
        let result = work();
        self.log.end(at);
        if let Some(call) = &mut self.log.entries.lock().spans[at].call {
            call.launches = first..self.queued();
        }
        Ok((at, result?))
    }

    /// Queues an op and writes it down, without the bytes of its tensors that it leaves `untouched`.
    fn run<'b, T: Op<'b>>(
        &self,
        op: &Checked<T>,
        queue: Queue,
        kind: Option<&'static str>,
        untouched: usize,
    ) -> Result<usize> {
        let uses = op.uses();
        let tensors = uses.iter().map(|one| (one.field.to_string(), format!("{:?}", one.tensor))).collect();
        let twice = |access| if access == Access::Update { 2 } else { 1 };
        let bytes: usize = uses.iter().map(|one| twice(one.access) * one.tensor.bytes()).sum();
        let bytes = bytes.saturating_sub(untouched);
        let call = Call { queue: Some(queue), kind, tensors, bytes, ..Call::default() };
        let (at, ()) = self.note(op.name(), call, || {
            op.queue(self.inner)?;
            if self.clock.is_none() { self.inner.wait() } else { Ok(()) }
        })?;
        Ok(at)
    }

    fn counts(&self, at: usize, arithmetic: Arithmetic) {
        self.log.entries.lock().arithmetic.push((at, arithmetic));
    }
}

/// Arithmetic of a call that depends on numbers on the device. They are read when the work is done, so the tensors that hold
/// them, small ones, are kept until then.
#[derive(Debug)]
enum Arithmetic {
    /// A product of as many rows as the last offset says, and at most this many.
    Product { row: f64, offsets: Tensor, most: usize },
    /// Passes over the keys that rows see from their starts on.
    Attention { passes: f64, shape: AttentionShape, start: Option<Tensor> },
}

impl Arithmetic {
    fn count(&self, known: &mut Known<'_>) -> Result<f64> {
        match self {
            Arithmetic::Product { row, offsets, most } => {
                let rows = known.words(offsets)?.last().map_or(0, |&last| last as usize).min(*most);
                Ok(row * rows as f64)
            }
            Arithmetic::Attention { passes, shape, start } => {
                let start = start.as_ref().map(|start| known.words(start)).transpose()?;
                let sees = |token: usize| {
                    let first = start.map_or(0, |start| start[token] as usize);
                    (token % shape.sequence + 1).saturating_sub(first)
                };
                let pairs: usize = (0..shape.batch * shape.sequence).map(sees).sum();
                Ok(passes * shape.flops(pairs))
            }
        }
    }
}

/// Tensors that have been read.
struct Known<'a> {
    backend: &'a dyn Backend,
    tensors: Vec<(Tensor, Vec<u32>)>,
}

impl Known<'_> {
    fn words(&mut self, tensor: &Tensor) -> Result<&[u32]> {
        let same = |known: &Tensor| {
            known.shares_storage(tensor) && known.offset() == tensor.offset() && known.len() == tensor.len()
        };
        let at = match self.tensors.iter().position(|(known, _)| same(known)) {
            Some(at) => at,
            None => {
                self.tensors.push((tensor.clone(), self.backend.download(tensor)?));
                self.tensors.len() - 1
            }
        };
        Ok(&self.tensors[at].1)
    }
}

impl Backend for Traced<'_> {
    fn caps(&self) -> &Caps {
        self.inner.caps()
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        self.inner.alloc(dtype, shape, memory)
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        let call = Call { bytes: bytes.len(), ..Call::default() };
        self.note("write", call, || self.inner.write(dst, bytes)).map(|_| ())
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        let call = Call { bytes: bytes.len(), ..Call::default() };
        self.note("read", call, || self.inner.read(src, bytes)).map(|_| ())
    }

    fn wait(&self) -> Result<()> {
        self.note("wait", Call::default(), || self.inner.wait()).map(|_| ())
    }

    fn timings(&self) -> Result<Option<Timings>> {
        self.inner.timings()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        self.inner.record(queue)
    }

    fn wait_for(&self, queue: Queue, event: &Event) -> Result<()> {
        self.inner.wait_for(queue, event)
    }

    fn log(&self) -> Option<&Log> {
        Some(&self.log)
    }

    fn grouped_gemm(&self, op: &Checked<GroupedGemm<'_>>) -> Result<()> {
        let kind = match op.kind {
            GemmKind::Forward => "forward",
            GemmKind::Dgrad => "dgrad",
            GemmKind::Wgrad => "wgrad",
        };
        let replaced = if op.accumulate { 0 } else { op.out.bytes() };
        let at = self.run(op, Queue::Compute, Some(kind), replaced)?;
        let (row, most) = (op.flops(1), op.product().ragged_extent());
        self.counts(at, Arithmetic::Product { row, offsets: op.offsets.clone(), most });
        Ok(())
    }

    fn attention(&self, op: &Checked<Attention<'_>>) -> Result<()> {
        let at = self.run(op, Queue::Compute, None, 0)?;
        let (passes, shape, start) = match &**op {
            Attention::Forward(op) => (1.0, op.shape, op.start),
            Attention::Backward(op) => (2.0, op.shape, op.start),
        };
        self.counts(at, Arithmetic::Attention { passes, shape, start: start.cloned() });
        Ok(())
    }

    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()> {
        let group = match op.group {
            Group::World => "world",
            Group::Experts => "experts",
            Group::Replicas => "replicas",
        };
        self.run(op, Queue::Comm, Some(group), 0).map(|_| ())
    }

    fn offload(&self, op: &Checked<Offload<'_>>) -> Result<()> {
        let to = if op.to.memory() == Memory::Host { "to host" } else { "to device" };
        self.run(op, Queue::Offload, Some(to), 0).map(|_| ())
    }

    fn group_quantize(&self, op: &Checked<GroupQuantize<'_>>) -> Result<()> {
        self.run(op, Queue::Compute, None, 0).map(|_| ())
    }

    fn route(&self, op: &Checked<Route<'_>>) -> Result<()> {
        self.run(op, Queue::Compute, None, 0).map(|_| ())
    }

    fn map(&self, op: &Checked<Map<'_>>) -> Result<()> {
        // Of a table, the rows that an index names.
        let untouched = match &**op {
            Map::GatherRows(gather) => gather.x.bytes().saturating_sub(gather.out.bytes()),
            Map::EmbeddingGrad(grad) => {
                2 * grad.d_table.bytes().saturating_sub(grad.dy.len() * grad.d_table.dtype().size())
            }
            _ => 0,
        };
        self.run(op, Queue::Compute, None, untouched).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{Host, HostOptions};
    use crate::ops::{AttentionForward, Fill, NONE, Operand};

    fn host() -> Host {
        Host::new(HostOptions { threads: 1, ..HostOptions::default() }).unwrap()
    }

    fn names(trace: &Trace) -> Vec<(&'static str, Option<usize>)> {
        trace.spans.iter().map(|span| (span.name, span.within)).collect()
    }

    #[test]
    fn a_call_belongs_to_the_parts_that_are_open() {
        let host = host();
        let traced = Traced::begin(&host).unwrap();
        let backend: &dyn Backend = &traced;
        let out = backend.alloc(DType::F32, &[4], Memory::Device).unwrap();
        let fill = |backend| Fill { out: &out, value: 1.0 }.run(backend).unwrap();
        let layer = backend.scope("layer", Some(7));
        let attention = backend.scope("attention", None);
        fill(backend);
        drop(attention);
        fill(backend);
        drop(layer);
        assert_eq!(backend.download::<f32>(&out).unwrap(), [1.0; 4]);
        // Who is not traced has parts, too, and nobody to tell.
        drop((&host as &dyn Backend).scope("layer", None));
        fill(&host);
        let trace = traced.end().unwrap();
        let expected = [("layer", None), ("attention", Some(0)), ("fill", Some(1)), ("fill", Some(0)), ("read", None)];
        assert_eq!(names(&trace), expected);
        let parts: Vec<_> = trace.parts(&trace.spans[2]).map(|part| (part.name, part.index)).collect();
        assert_eq!(parts, [("attention", None), ("layer", Some(7))]);
        let queues: Vec<_> = trace.spans.iter().map(|span| trace.on_queues(span).len()).collect();
        assert_eq!(queues, [0, 0, 1, 1, 0]);
        assert!(trace.spans.iter().all(|span| span.time.begin <= span.time.end && span.time.end <= trace.length));
    }

    #[test]
    fn operations_are_those_of_rows_and_keys_that_are_there() {
        let host = host();
        let backend: &dyn Backend = &host;
        let zeros = |shape: &[usize]| backend.upload(DType::F32, shape, &vec![0f32; shape.iter().product()]).unwrap();
        let (x, w, y) = (zeros(&[16, 3]), zeros(&[2, 5, 3]), zeros(&[16, 5]));
        let offsets = backend.upload(DType::U32, &[3], &[0u32, 4, 7]).unwrap();
        let (q, kv, lse) = (zeros(&[4, 6]), zeros(&[4, 3]), zeros(&[4, 2]));
        let out = zeros(&[4, 6]);
        let start = backend.upload(DType::U32, &[4], &[0, 1, 0, NONE]).unwrap();
        let shape = AttentionShape { batch: 2, sequence: 2, heads: 2, kv_heads: 1, qk_dim: 3, v_dim: 3, scale: 1.0 };

        let traced = Traced::begin(&host).unwrap();
        let (a, b) = (Operand::plain(&x), Operand::plain(&w));
        let kind = GemmKind::Forward;
        GroupedGemm { kind, a, b, offsets: &offsets, out: &y, accumulate: false }.run(&traced).unwrap();
        GroupedGemm { kind, a, b, offsets: &offsets, out: &y, accumulate: true }.run(&traced).unwrap();
        let forward = AttentionForward { q: &q, k: &kv, v: &kv, start: Some(&start), out: &out, lse: &lse, shape };
        Attention::Forward(forward).run(&traced).unwrap();
        let trace = traced.end().unwrap();
        let calls: Vec<&Call> = trace.spans.iter().filter_map(|span| span.call.as_ref()).collect();
        let flops: Vec<_> = calls.iter().map(|call| call.flops).collect();
        // Rows see one key, the second of two, one, and none.
        assert_eq!(flops, [Some(2.0 * 7.0 * 15.0), Some(2.0 * 7.0 * 15.0), Some(2.0 * 2.0 * 6.0 * 3.0)]);
        let inputs = 4 * (16 * 3 + 2 * 15 + 3);
        assert_eq!([calls[0].bytes, calls[1].bytes], [inputs + 4 * 80, inputs + 2 * 4 * 80]);
    }
}
