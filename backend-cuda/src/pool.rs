//! Memory that comes from the driver and is kept for the next tensor of its size.
//!
//! Memory that a tensor leaves is given to the next one of its size without asking the driver and without waiting: work runs
//! in the order of a stream, so what the compute stream does next with it comes after what it did before. What another
//! stream does with it is ordered by events: see [`crate::memory`]. Steps of one shape therefore get the same addresses
//! again and again.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dropless_core::Result;
use parking_lot::Mutex;

use crate::driver::{self, Address, Event, Kind};

/// Sizes are rounded up to a multiple of a power of two that is at most an eighth of them, and of this.
const GRANULE: usize = 512;

/// An allocation, and the work of other streams that must be done before it is used again.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) address: Address,
    pub(crate) bytes: usize,
    pub(crate) fences: Vec<Event>,
}

/// What keeps a caller's memory alive.
pub(crate) type KeepAlive = Arc<dyn Any + Send + Sync>;

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

/// The bytes that a tensor of so many takes of the device.
pub fn block_bytes(bytes: u64) -> u64 {
    usize::try_from(bytes).map_or(u64::MAX, |bytes| rounded(bytes) as u64)
}

/// The size of the block for a tensor.
pub(crate) fn rounded(bytes: usize) -> usize {
    let step = (bytes.max(1).next_power_of_two() / 16).max(GRANULE);
    bytes.max(1).next_multiple_of(step)
}

impl Pool {
    pub(crate) fn new(kind: Kind) -> Arc<Pool> {
        Arc::new(Pool { kind, free: Mutex::default(), held: AtomicU64::new(0), live: AtomicU64::new(0) })
    }

    /// A free block of exactly this size, out of those that [`rounded`] returns.
    pub(crate) fn take(&self, bytes: usize) -> Option<Block> {
        let block = self.free.lock().get_mut(&bytes)?.pop()?;
        self.live.fetch_add(block.bytes as u64, Ordering::Relaxed);
        Some(block)
    }

    /// A new block; None when there is not enough memory.
    pub(crate) fn grow(&self, bytes: usize) -> Result<Option<Block>> {
        let address = driver::allocate(self.kind, bytes)?;
        Ok(address.map(|address| {
            self.held.fetch_add(bytes as u64, Ordering::Relaxed);
            self.live.fetch_add(bytes as u64, Ordering::Relaxed);
            Block { address, bytes, fences: Vec::new() }
        }))
    }

    /// A tensor has left a block of this size.
    pub(crate) fn left(&self, bytes: usize) {
        self.live.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    /// Takes a block for tensors to come.
    pub(crate) fn put(&self, block: Block) {
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
    /// Of the memory of callers that a graph works on.
    kept: Arc<Mutex<Vec<KeepAlive>>>,
}

impl Pools {
    pub(crate) fn new() -> Pools {
        Pools { device: Pool::new(Kind::Device), pinned: Pool::new(Kind::Pinned), kept: Arc::default() }
    }

    /// Keeps a caller's memory alive as long as these pools.
    pub(crate) fn keep(&self, keep_alive: KeepAlive) {
        self.kept.lock().push(keep_alive);
    }

    pub(crate) fn of(&self, kind: Kind) -> &Arc<Pool> {
        match kind {
            Kind::Device => &self.device,
            Kind::Pinned => &self.pinned,
        }
    }
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
