//! A backend around another one that counts the bytes of the tensors that live there, writes down what is asked of it, and
//! sees when its rank has suspended the timeouts of the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use dropless_core::backend::{Caps, Event, Queue, Timings};
use dropless_core::ops::Op;
use dropless_core::timeouts::{Suspend, Timeouts};
use dropless_core::{Backend, Checked, DType, Error, Memory, Result, Tensor};
use parking_lot::Mutex;

/// See the module.
#[derive(Debug)]
pub struct Metered<B> {
    caps: Caps,
    inner: B,
    meter: Arc<Meter>,
    /// Of each memory alone.
    parts: [Arc<Meter>; 2],
    busy: Arc<Busy>,
    calls: Arc<Mutex<Vec<Call>>>,
    ops: Arc<Mutex<Ops>>,
}

/// How many ops there were of each name.
pub type Ops = BTreeMap<&'static str, usize>;

/// A call that is written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// [`Backend::read`] of so many bytes.
    Read(usize),
    /// [`Backend::wait`].
    Wait,
    /// [`Backend::grouped_gemm`].
    Gemm,
    /// [`dropless_core::ops::AdamW`].
    AdamW,
}

#[derive(Debug, Default)]
struct Meter {
    live: AtomicUsize,
    most: AtomicUsize,
}

/// The inner tensor of one; gives its bytes back with the last clone.
#[derive(Debug)]
struct Lease {
    inner: Tensor,
    meters: [Arc<Meter>; 2],
}

impl Drop for Lease {
    fn drop(&mut self) {
        for meter in &self.meters {
            meter.live.fetch_sub(self.inner.bytes(), Ordering::Relaxed);
        }
    }
}

/// The timeouts of the inner backend, and whether this rank has suspended them.
#[derive(Debug)]
struct Busy {
    inner: Timeouts,
    rank: usize,
    busy: AtomicBool,
}

impl Busy {
    fn set(&self, busy: bool) {
        assert_ne!(self.busy.swap(busy, Ordering::Relaxed), busy, "rank {}: busy is {busy} already", self.rank);
    }
}

impl Suspend for Busy {
    fn suspend(&self) -> Result<()> {
        self.inner.suspend()?;
        self.set(true);
        Ok(())
    }

    fn resume(&self) -> Result<()> {
        self.set(false);
        self.inner.resume()
    }
}

impl<B: Backend> Metered<B> {
    /// Around a backend.
    pub fn new(inner: B) -> Metered<B> {
        let Caps { rank, timeouts, .. } = inner.caps().clone();
        let busy = Arc::new(Busy { inner: timeouts, rank, busy: AtomicBool::default() });
        let caps = Caps { timeouts: Timeouts::new(busy.clone()), ..inner.caps().clone() };
        Metered {
            caps,
            inner,
            meter: Arc::default(),
            parts: Default::default(),
            busy,
            calls: Arc::default(),
            ops: Arc::default(),
        }
    }

    /// Bytes of the tensors that live now, in either memory.
    pub fn live(&self) -> usize {
        self.meter.live.load(Ordering::Relaxed)
    }

    /// The most that [`live`](Metered::live) was since the last call, which begins anew.
    pub fn take_most(&self) -> usize {
        self.meter.most.swap(self.live(), Ordering::Relaxed)
    }

    /// The most bytes that lived in a memory so far.
    pub fn most_of(&self, memory: Memory) -> usize {
        self.part(memory).most.load(Ordering::Relaxed)
    }

    fn part(&self, memory: Memory) -> &Arc<Meter> {
        &self.parts[usize::from(memory == Memory::Host)]
    }

    /// The calls so far, and those to come.
    pub fn calls(&self) -> Arc<Mutex<Vec<Call>>> {
        self.calls.clone()
    }

    /// The ops so far, and those to come.
    pub fn ops(&self) -> Arc<Mutex<Ops>> {
        self.ops.clone()
    }

    fn note(&self, call: Call) {
        self.calls.lock().push(call);
    }

    /// Whether the rank has suspended its [timeouts](Timeouts).
    pub fn is_busy(&self) -> bool {
        self.busy.busy.load(Ordering::Relaxed)
    }

    fn inner(&self, op: &'static str, tensor: &Tensor) -> Result<Tensor> {
        let lease = tensor.storage::<Lease>().ok_or(Error::ForeignTensor { op, backend: "metered" })?;
        tensor.view_of(&lease.inner)
    }

    fn run<'a, T: Op<'a>>(&self, op: &Checked<T>) -> Result<()> {
        let name = op.name();
        *self.ops.lock().entry(name).or_default() += 1;
        match name {
            "grouped_gemm" => self.note(Call::Gemm),
            "adamw" => self.note(Call::AdamW),
            "all_to_all" => {
                assert!(!self.is_busy(), "rank {} begins an exchange while it is busy by itself", self.caps.rank);
            }
            _ => {}
        }
        op.over(|tensor| self.inner(name, tensor), |op| op.queue(&self.inner))
    }
}

impl<B: Backend> Backend for Metered<B> {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        let inner = self.inner.alloc(dtype, shape, memory)?;
        let bytes = inner.bytes();
        let meters = [self.meter.clone(), self.part(memory).clone()];
        for meter in &meters {
            let live = meter.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
            meter.most.fetch_max(live, Ordering::Relaxed);
        }
        let lease = Lease { inner, meters };
        Ok(Tensor::from_storage(Arc::new(lease), shape, dtype, memory))
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        self.inner.write(&self.inner("write", dst)?, bytes)
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        self.note(Call::Read(bytes.len()));
        self.inner.read(&self.inner("read", src)?, bytes)
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

    dropless_core::each_op!(run: grouped_gemm, group_quantize, all_to_all, offload, route, attention, map);
}
