//! Tensors in the memory of the device, and in pinned memory of the host.
//!
//! Memory that a tensor leaves is kept for the next one of its size, without asking the driver and without waiting: work
//! runs in the order of a stream, so what the compute stream does next with it comes after what it did before. The two
//! cases in which another stream takes part are ordered by events: a tensor that one of them used waits, before it is
//! given out again, until that stream is done with it; and the first use of a tensor on one of them comes after the
//! compute stream's work so far. Steps of one shape therefore get the same addresses again and again.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use dropless_core::{DType, Error, Memory, Queue, Result, Tensor};
use parking_lot::Mutex;

use crate::BACKEND;
use crate::device::Gpu;
use crate::driver::{self, Address, Event, Kind};

/// Sizes are rounded up to a multiple of a power of two that is at most an eighth of them, and of this.
const GRANULE: usize = 512;

/// An allocation, and the work of other streams that must be done before it is used again.
#[derive(Debug)]
struct Block {
    address: Address,
    bytes: usize,
    fences: Vec<Event>,
}

/// Free blocks by size.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) kind: Kind,
    free: Mutex<BTreeMap<usize, Vec<Block>>>,
    /// Bytes that came from the driver.
    held: AtomicU64,
    /// Bytes of the tensors that live.
    live: AtomicU64,
}

/// The size of the block for a tensor.
fn rounded(bytes: usize) -> usize {
    let step = (bytes.max(1).next_power_of_two() / 16).max(GRANULE);
    bytes.max(1).next_multiple_of(step)
}

impl Pool {
    pub(crate) fn new(kind: Kind) -> Arc<Pool> {
        Arc::new(Pool { kind, free: Mutex::default(), held: AtomicU64::new(0), live: AtomicU64::new(0) })
    }

    fn take(&self, bytes: usize) -> Option<Block> {
        self.free.lock().get_mut(&bytes)?.pop()
    }

    fn put(&self, block: Block) {
        self.free.lock().entry(block.bytes).or_default().push(block);
    }

    /// Gives free blocks back to the driver. The device must have no work left that uses them.
    pub(crate) fn trim(&self) {
        let free = std::mem::take(&mut *self.free.lock());
        for block in free.into_values().flatten() {
            self.held.fetch_sub(block.bytes as u64, Ordering::Relaxed);
            driver::release(self.kind, block.address);
        }
    }

    /// Bytes that came from the driver, and bytes of living tensors.
    pub(crate) fn usage(&self) -> (u64, u64) {
        (self.held.load(Ordering::Relaxed), self.live.load(Ordering::Relaxed))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.trim();
    }
}

/// A pool of each kind: those of a device, or of a graph.
#[derive(Clone, Debug)]
pub(crate) struct Pools {
    device: Arc<Pool>,
    pinned: Arc<Pool>,
}

impl Pools {
    pub(crate) fn new() -> Pools {
        Pools { device: Pool::new(Kind::Device), pinned: Pool::new(Kind::Pinned) }
    }

    pub(crate) fn of(&self, kind: Kind) -> &Arc<Pool> {
        match kind {
            Kind::Device => &self.device,
            Kind::Pinned => &self.pinned,
        }
    }
}

/// The memory of a tensor.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// Where the block goes in the end. Goes before the device, whose context it needs to give memory back.
    pool: Arc<Pool>,
    gpu: Arc<Gpu>,
    block: Option<Block>,
    /// Bit q: queue q has used it.
    used: AtomicU8,
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
    let block = match pool.take(size) {
        Some(block) => block,
        None => {
            let address = match driver::allocate(kind, size)? {
                Some(address) => address,
                None => {
                    // What is kept for other sizes may be enough. What a recording keeps is its graph's.
                    if !gpu.recording() {
                        gpu.trim(OP, kind)?;
                    }
                    let available = driver::memory_info()?.0;
                    driver::allocate(kind, size)?.ok_or_else(|| refused(available))?
                }
            };
            pool.held.fetch_add(size as u64, Ordering::Relaxed);
            Block { address, bytes: size, fences: Vec::new() }
        }
    };
    for fence in &block.fences {
        gpu.stream(Queue::Compute).wait(OP, fence)?;
    }
    pool.live.fetch_add(size as u64, Ordering::Relaxed);
    let block = Block { fences: Vec::new(), ..block };
    let buffer = Buffer { gpu: gpu.clone(), pool, block: Some(block), used: AtomicU8::new(0) };
    Ok(Tensor::from_storage(Arc::new(buffer), shape, dtype, memory))
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
        Ok(self.block.as_ref().expect("a living buffer").address)
    }
}

/// The addresses of a view, for work on `queue`.
pub(crate) fn addresses(op: &'static str, gpu: &Arc<Gpu>, tensor: &Tensor, queue: Queue) -> Result<Range<Address>> {
    let start = Buffer::of(op, gpu, tensor)?.on(op, queue)? + (tensor.offset() * tensor.dtype().size()) as Address;
    Ok(start..start + tensor.bytes() as Address)
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(mut block) = self.block.take() else { return };
        self.pool.live.fetch_sub(block.bytes as u64, Ordering::Relaxed);
        let used = self.used.load(Ordering::Relaxed);
        // A failure of the device is reported to whoever waits; until then nothing is given out again.
        let mut fenced = self.gpu.bind("drop").is_ok();
        for queue in [Queue::Comm, Queue::Offload] {
            if used & bit(queue) != 0 {
                match self.gpu.fence(queue) {
                    Ok(event) => block.fences.extend(event),
                    Err(_) => fenced = false,
                }
            }
        }
        if fenced {
            self.gpu.recycle(&self.pool).put(block);
        }
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
    // SAFETY: the view lies inside its buffer. The driver has read pageable memory when the call returns.
    unsafe { driver::copy(op, gpu.stream(Queue::Compute), to.start, bytes.as_ptr() as Address, bytes.len()) }?;
    // A copy within the host is made by the driver at some time.
    if tensor.memory() == Memory::Host { gpu.wait(op, Queue::Compute) } else { Ok(()) }
}

/// Waits for the compute stream, and copies a tensor's bytes out.
pub(crate) fn read(op: &'static str, gpu: &Arc<Gpu>, tensor: &Tensor, bytes: &mut [u8]) -> Result<()> {
    not_recorded(op, gpu)?;
    gpu.bind(op)?;
    let from = addresses(op, gpu, tensor, Queue::Compute)?;
    settle(op, gpu, tensor)?;
    let stream = gpu.stream(Queue::Compute);
    // SAFETY: the view lies inside its buffer; `bytes` is the caller's until the stream is done.
    unsafe { driver::copy(op, stream, bytes.as_mut_ptr() as Address, from.start, bytes.len()) }?;
    gpu.wait(op, Queue::Compute)
}

/// Host memory is written by the offload stream, which no one orders with a caller's read or write.
fn settle(op: &'static str, gpu: &Gpu, tensor: &Tensor) -> Result<()> {
    if tensor.memory() == Memory::Host { gpu.order(op, Queue::Offload, Queue::Compute) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::rounded;

    #[test]
    fn sizes_fall_into_few_classes() {
        assert_eq!(rounded(0), 512);
        assert_eq!(rounded(512), 512);
        assert_eq!(rounded(513), 1024);
        assert_eq!(rounded(100_000), 106_496);
        assert_eq!(rounded(1 << 30), 1 << 30);
        for bytes in [1, 700, 5000, 123_456, 99_999_999] {
            assert!(rounded(bytes) >= bytes && rounded(bytes) <= bytes + (bytes / 8).max(512));
        }
    }
}
