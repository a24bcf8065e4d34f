//! Tensors in the memory of the device, and in pinned memory of the host: new ones, those of callers, and copies.
//!
//! Three cases are ordered by events: memory that another stream than the compute stream used waits, before it is given out
//! again, until that stream is done with it; the first use of a tensor on such a stream comes after the compute stream's
//! work so far; and memory of a caller is let go once every stream that used it is done with it.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};

use dropless_core::{DType, Error, Memory, Queue, Result, Tensor};

use crate::BACKEND;
use crate::device::{Gpu, QUEUES};
use crate::driver::{self, Address, Event, Kind};
use crate::loans::Loans;
use crate::pool::{Block, KeepAlive, Pool, rounded};

/// The memory of a tensor.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// Goes before the device, whose context it needs to give memory back.
    owner: Option<Owner>,
    address: Address,
    gpu: Arc<Gpu>,
    /// Bit q: queue q has used it.
    used: AtomicU8,
}

/// Whose the memory is.
#[derive(Debug)]
enum Owner {
    /// A pool's, to which the block goes in the end.
    Pool(Arc<Pool>, Block),
    /// A caller's.
    Caller(KeepAlive, Weak<Loans>),
}

const fn bit(queue: Queue) -> u8 {
    match queue {
        Queue::Compute => 1,
        Queue::Comm => 2,
        Queue::Offload => 4,
    }
}

/// A new tensor.
pub(crate) fn alloc(gpu: &Arc<Gpu>, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
    const OP: &str = "alloc";
    let kind = match memory {
        Memory::Device => Kind::Device,
        Memory::Host => Kind::Pinned,
    };
    let wanted = shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d));
    let refused = |available: usize| Error::Capacity {
        op: OP,
        needed: wanted.map_or(u64::MAX, |n| n as u64),
        available: available as u64,
        hint: match kind {
            Kind::Device => "the memory of the device; a smaller batch, more chunks, or offloaded activations".into(),
            Kind::Pinned => "pinned memory of the host".into(),
        },
    };
    gpu.bind(OP)?;
    let most = usize::try_from(gpu.memory_bytes).unwrap_or(usize::MAX);
    let bytes = wanted.filter(|&n| n <= most).ok_or_else(|| refused(most))?;
    let size = rounded(bytes);
    let pool = gpu.pool(kind);
    let free = pool.take(size).map_or_else(|| pool.grow(size), |block| Ok(Some(block)))?;
    let mut block = match free {
        Some(block) => block,
        None => {
            // What is kept for other sizes may be enough. What a recording keeps is its graph's.
            if !gpu.recording() {
                gpu.trim(OP, kind)?;
            }
            let available = driver::memory_info()?.0;
            pool.grow(size)?.ok_or_else(|| refused(available))?
        }
    };
    let waited = block.fences.drain(..).try_for_each(|fence| gpu.stream(Queue::Compute).wait(OP, &fence));
    waited.inspect_err(|_| pool.left(size))?;
    let address = block.address;
    let buffer = Buffer { owner: Some(Owner::Pool(pool, block)), address, gpu: gpu.clone(), used: AtomicU8::new(0) };
    Ok(Tensor::from_storage(Arc::new(buffer), shape, dtype, memory))
}

/// Allocations begin at multiples of this; a caller's tensor may begin anywhere in one.
const ALIGNMENT: Address = 256;

/// A tensor in memory of a caller: see [`crate::Cuda::import`].
///
/// # Safety
/// The memory is of this size, lives as long as `keep_alive`, and may be used by the compute stream's work to come.
pub(crate) unsafe fn import(
    gpu: &Arc<Gpu>,
    loans: &Arc<Loans>,
    pointer: Address,
    shape: &[usize],
    dtype: DType,
    keep_alive: KeepAlive,
) -> Result<Tensor> {
    const OP: &str = "import";
    let argument = |field, expected, found| Error::Argument { op: OP, field, expected, found };
    let bytes = shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d));
    let bytes = bytes.filter(|&bytes| bytes as u64 <= gpu.memory_bytes).ok_or_else(|| {
        argument("shape", format!("at most the {} bytes of the device", gpu.memory_bytes), format!("{shape:?}"))
    })?;
    if !pointer.is_multiple_of(dtype.size() as Address) {
        return Err(argument(
            "pointer",
            format!("a multiple of the {} bytes of {dtype:?}", dtype.size()),
            format!("{pointer:#x}"),
        ));
    }
    gpu.bind(OP)?;
    if bytes > 0 && driver::device_of(OP, pointer)? != Some(gpu.context().device) {
        return Err(argument("pointer", format!("memory of device {}", gpu.context().device), format!("{pointer:#x}")));
    }
    loans.settle();
    // An offset says how a view is aligned.
    let address = pointer / ALIGNMENT * ALIGNMENT;
    let first = usize::try_from(pointer - address).expect("less than the alignment") / dtype.size();
    let len = bytes / dtype.size();
    let owner = Some(Owner::Caller(keep_alive, Arc::downgrade(loans)));
    let buffer = Buffer { owner, address, gpu: gpu.clone(), used: AtomicU8::new(0) };
    let whole = Tensor::from_storage(Arc::new(buffer), &[first + len], dtype, Memory::Device);
    whole.slice(first, first + len)?.reshape(shape)
}

impl Buffer {
    /// The memory of a tensor that lives on this device.
    pub(crate) fn of<'a>(op: &'static str, gpu: &Arc<Gpu>, tensor: &'a Tensor) -> Result<&'a Buffer> {
        let foreign = || Error::ForeignTensor { op, backend: BACKEND };
        tensor.storage::<Buffer>().filter(|buffer| Arc::ptr_eq(&buffer.gpu, gpu)).ok_or_else(foreign)
    }

    /// The first address, for work on `queue`, which from now on belongs to the buffer's past.
    pub(crate) fn on(&self, op: &'static str, queue: Queue) -> Result<Address> {
        let before = self.used.fetch_or(bit(queue), Ordering::Relaxed);
        if before & bit(queue) == 0 && queue != Queue::Compute {
            self.gpu.order(op, Queue::Compute, queue)?;
        }
        Ok(self.address)
    }
}

/// The addresses of a view, for work on `queue`.
pub(crate) fn addresses(op: &'static str, gpu: &Arc<Gpu>, tensor: &Tensor, queue: Queue) -> Result<Range<Address>> {
    let buffer = Buffer::of(op, gpu, tensor)?;
    // A recording runs again when its caller may have dropped what it was given.
    gpu.keep_recorded(|graph| match &buffer.owner {
        Some(Owner::Pool(pool, _)) if graph.has(pool) => None,
        _ => tensor.shared_storage::<Buffer>().map(|buffer| buffer as KeepAlive),
    });
    let start = buffer.on(op, queue)? + (tensor.offset() * tensor.dtype().size()) as Address;
    Ok(start..start + tensor.bytes() as Address)
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(owner) = self.owner.take() else { return };
        // A failure of the device is reported to whoever waits; until then nothing is given out again.
        let bound = self.gpu.bind("drop");
        let used = self.used.load(Ordering::Relaxed);
        let fences = |queues: &[Queue]| -> Result<Vec<Event>> {
            let used = queues.iter().filter(|&&queue| used & bit(queue) != 0);
            let fences = used.map(|&queue| self.gpu.fence(queue)).collect::<Result<Vec<_>>>()?;
            Ok(fences.into_iter().flatten().collect())
        };
        match owner {
            Owner::Pool(pool, block) => {
                pool.left(block.bytes);
                // A tensor that a recording made and gave out may be the last that holds the graph's pool, which gives its
                // blocks back to the driver as it goes.
                let waited = match self.gpu.outlives(&pool) {
                    true => bound,
                    false => bound.and_then(|()| self.gpu.synchronize("drop")),
                };
                if let Ok(fences) = waited.and_then(|()| fences(&[Queue::Comm, Queue::Offload])) {
                    self.gpu.recycle(&pool).put(Block { fences, ..block });
                }
            }
            Owner::Caller(keep_alive, loans) => {
                // All earlier work was done when a recording began.
                if let Err(keep_alive) = self.gpu.keep(keep_alive) {
                    Loans::take(&loans, bound.and_then(|()| fences(&QUEUES)), keep_alive);
                }
            }
        }
    }
}

impl Gpu {
    /// A tensor for intermediate results.
    pub(crate) fn alloc(self: &Arc<Self>, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        alloc(self, dtype, shape, Memory::Device)
    }

    /// Queues the filling of a tensor's bytes.
    pub(crate) fn fill(self: &Arc<Self>, op: &'static str, tensor: &Tensor, byte: u8) -> Result<()> {
        self.bind(op)?;
        let to = addresses(op, self, tensor, Queue::Compute)?;
        // SAFETY: the view lies inside its buffer, which is kept until the stream is done with it.
        self.timed("fill", Queue::Compute, || unsafe {
            driver::fill(op, self.stream(Queue::Compute), to.start, byte, tensor.bytes())
        })?;
        self.launched(op, Queue::Compute)
    }

    /// Queues a copy of the bytes of `from` to `to`, which has as many, wherever they lie.
    pub(crate) fn copy(self: &Arc<Self>, op: &'static str, from: &Tensor, to: &Tensor, queue: Queue) -> Result<()> {
        debug_assert_eq!(from.bytes(), to.bytes(), "{op}");
        self.bind(op)?;
        let source = addresses(op, self, from, queue)?;
        let target = addresses(op, self, to, queue)?;
        // SAFETY: both views lie inside their buffers, which are kept until the stream is done with them.
        self.timed("copy", queue, || unsafe {
            driver::copy(op, self.stream(queue), target.start, source.start, from.bytes())
        })?;
        self.launched(op, queue)
    }
}

/// A recorded copy would find the caller's bytes at every launch, long after they are gone.
fn not_recorded(op: &'static str, gpu: &Gpu) -> Result<()> {
    if gpu.recording() {
        let what = "memory of the host cannot be read or written while work is recorded".into();
        return Err(Error::Device { backend: BACKEND, op, what });
    }
    Ok(())
}

/// Copies bytes into a tensor, after the compute stream's work so far. The bytes are the caller's again on return.
pub(crate) fn write(op: &'static str, gpu: &Arc<Gpu>, tensor: &Tensor, bytes: &[u8]) -> Result<()> {
    not_recorded(op, gpu)?;
    gpu.bind(op)?;
    let to = addresses(op, gpu, tensor, Queue::Compute)?;
    settle(op, gpu, tensor)?;
    // SAFETY: the view lies inside its buffer, which is kept until the stream is done with it. The driver has read pageable
    // memory when the call returns, and what is not pageable is the caller's again only after the wait below.
    gpu.timed("copy", Queue::Compute, || unsafe {
        driver::copy(op, gpu.stream(Queue::Compute), to.start, bytes.as_ptr() as Address, bytes.len())
    })?;
    // A copy within the host is made by the driver at some time, and one from memory that it knows (pinned, or registered
    // by someone else in this process) by the device.
    let at_some_time = tensor.memory() == Memory::Host || known(op, bytes)?;
    if at_some_time { gpu.wait(op, Queue::Compute) } else { Ok(()) }
}

/// Waits for the compute stream, and copies a tensor's bytes out. Those in the memory of the host wait for the offload stream
/// alone, which writes there, so that a thread may read them while the device computes.
pub(crate) fn read(op: &'static str, gpu: &Arc<Gpu>, tensor: &Tensor, bytes: &mut [u8]) -> Result<()> {
    not_recorded(op, gpu)?;
    gpu.bind(op)?;
    if tensor.memory() == Memory::Host {
        let from = addresses(op, gpu, tensor, Queue::Offload)?.start;
        gpu.wait(op, Queue::Offload)?;
        // SAFETY: the view lies inside its buffer, pinned memory that the processor sees. Nobody writes there now: the offload
        // stream has done what was queued on it before this call, and `write` has waited.
        bytes.copy_from_slice(unsafe { std::slice::from_raw_parts(from as *const u8, bytes.len()) });
        return Ok(());
    }
    let from = addresses(op, gpu, tensor, Queue::Compute)?;
    let stream = gpu.stream(Queue::Compute);
    // SAFETY: the view lies inside its buffer; `bytes` is the caller's until the stream is done.
    gpu.timed("copy", Queue::Compute, || unsafe {
        driver::copy(op, stream, bytes.as_mut_ptr() as Address, from.start, bytes.len())
    })?;
    gpu.wait(op, Queue::Compute)
}

/// Whether the driver knows an end of these bytes, so that it need not copy them before a call returns. Memory that is
/// registered in part has an end that is, or is refused by the copy.
fn known(op: &'static str, bytes: &[u8]) -> Result<bool> {
    let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else { return Ok(false) };
    let known = |byte: &u8| driver::knows(op, std::ptr::from_ref(byte) as Address);
    Ok(known(first)? || known(last)?)
}

/// Host memory is written by the offload stream, which no one orders with a caller's read or write.
fn settle(op: &'static str, gpu: &Gpu, tensor: &Tensor) -> Result<()> {
    if tensor.memory() == Memory::Host { gpu.order(op, Queue::Offload, Queue::Compute) } else { Ok(()) }
}
