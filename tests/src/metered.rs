//! A backend around another one that counts the bytes of the tensors that live there, writes down what is asked of it, and
//! sees when its rank is away.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use dropless_core::backend::{Caps, Event, Queue, Timings};
use dropless_core::ops::{AllToAll, Attention, Checked, GroupQuantize, GroupedGemm, Map, Offload, Route};
use dropless_core::{Backend, DType, Memory, Result, Tensor};
use parking_lot::Mutex;

/// See the module.
#[derive(Debug)]
pub struct Metered<B> {
    inner: B,
    meter: Arc<Meter>,
    away: AtomicBool,
    calls: Arc<Mutex<Vec<Call>>>,
}

/// A call that is written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// [`Backend::read`] of so many bytes.
    Read(usize),
    /// [`Backend::wait`].
    Wait,
    /// [`Backend::grouped_gemm`].
    Gemm,
    /// [`Map::AdamW`].
    AdamW,
}

#[derive(Debug, Default)]
struct Meter {
    live: AtomicUsize,
    most: AtomicUsize,
}

/// The second buffer of every tensor: gives its bytes back with the last clone.
#[derive(Debug)]
struct Lease {
    meter: Arc<Meter>,
    bytes: usize,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.meter.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl<B: Backend> Metered<B> {
    /// Around a backend.
    pub fn new(inner: B) -> Metered<B> {
        Metered { inner, meter: Arc::default(), away: AtomicBool::default(), calls: Arc::default() }
    }

    /// Bytes of the tensors that live now, in either memory.
    pub fn live(&self) -> usize {
        self.meter.live.load(Ordering::Relaxed)
    }

    /// The most that [`live`](Metered::live) was since the last call, which begins anew.
    pub fn take_most(&self) -> usize {
        self.meter.most.swap(self.live(), Ordering::Relaxed)
    }

    /// The calls so far, and those to come.
    pub fn calls(&self) -> Arc<Mutex<Vec<Call>>> {
        self.calls.clone()
    }

    fn note(&self, call: Call) {
        self.calls.lock().push(call);
    }

    /// Whether the rank is [away](Backend::set_away).
    pub fn is_away(&self) -> bool {
        self.away.load(Ordering::Relaxed)
    }
}

impl<B: Backend> Backend for Metered<B> {
    fn caps(&self) -> &Caps {
        self.inner.caps()
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        let tensor = self.inner.alloc(dtype, shape, memory)?;
        let bytes = tensor.bytes();
        let live = self.meter.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.meter.most.fetch_max(live, Ordering::Relaxed);
        let lease = Arc::new(Lease { meter: self.meter.clone(), bytes });
        Ok(Tensor::twins(&tensor, &Tensor::from_storage(lease, shape, dtype, memory)))
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        self.inner.write(dst, bytes)
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        self.note(Call::Read(bytes.len()));
        self.inner.read(src, bytes)
    }

    fn wait(&self) -> Result<()> {
        self.note(Call::Wait);
        self.inner.wait()
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

    fn grouped_gemm(&self, op: &Checked<GroupedGemm<'_>>) -> Result<()> {
        self.note(Call::Gemm);
        self.inner.grouped_gemm(op)
    }

    fn group_quantize(&self, op: &Checked<GroupQuantize<'_>>) -> Result<()> {
        self.inner.group_quantize(op)
    }

    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()> {
        assert!(!self.is_away(), "rank {} begins an exchange while it is away", self.caps().rank);
        self.inner.all_to_all(op)
    }

    fn set_away(&self, away: bool) -> Result<()> {
        assert_ne!(self.away.swap(away, Ordering::Relaxed), away, "rank {} is there already", self.caps().rank);
        self.inner.set_away(away)
    }

    fn offload(&self, op: &Checked<Offload<'_>>) -> Result<()> {
        self.inner.offload(op)
    }

    fn route(&self, op: &Checked<Route<'_>>) -> Result<()> {
        self.inner.route(op)
    }

    fn attention(&self, op: &Checked<Attention<'_>>) -> Result<()> {
        self.inner.attention(op)
    }

    fn map(&self, op: &Checked<Map<'_>>) -> Result<()> {
        if matches!(&**op, Map::AdamW(_)) {
            self.note(Call::AdamW);
        }
        self.inner.map(op)
    }
}
