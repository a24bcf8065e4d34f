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

/// What keeps memory alive: a caller's, or a buffer itself.
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

    /// Gives free blocks back to the driver.
    ///
    /// What `wait` waits for comes after they are taken, so that none is among them which another thread leaves meanwhile.
    ///
    /// # Errors
    /// That of `wait`; nothing is given back then.
    ///
    /// # Safety
    /// When `wait` has succeeded, the device has no work left that was queued before its call.
    pub(crate) unsafe fn trim(&self, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        let free = std::mem::take(&mut *self.free.lock()).into_values().flatten();
        if let Err(error) = wait() {
            free.for_each(|block| self.put(block));
            return Err(error);
        }
        for block in free {
            self.held.fetch_sub(block.bytes as u64, Ordering::Relaxed);
            // SAFETY: `grow` allocated it, and no tensor has it. All work with it was queued before `wait`, which the caller
            // promises to be done.
            unsafe { driver::release(self.kind, block.address) };
        }
        Ok(())
    }

    /// Bytes that came from the driver, and bytes of living tensors.
    pub(crate) fn usage(&self) -> (u64, u64) {
        (self.held.load(Ordering::Relaxed), self.live.load(Ordering::Relaxed))
    }
}

impl Drop for Pool {
    /// The pools of a device go after its work: `Gpu` waits in `drop`. Those of a graph go after its last launch, since `Graph`
    /// waits in `drop`, and after the last tensor that it gave out, which waits, too.
    fn drop(&mut self) {
        // SAFETY: so the device is done with the blocks.
        let _ = unsafe { self.trim(|| Ok(())) };
    }
}

/// A pool of each kind: those of a device, or of a graph.
#[derive(Clone, Debug)]
pub(crate) struct Pools {
    device: Arc<Pool>,
    pinned: Arc<Pool>,
    /// What a graph works on and did not make itself, by its address.
    kept: Arc<Mutex<BTreeMap<usize, KeepAlive>>>,
}

impl Pools {
    pub(crate) fn new() -> Pools {
        Pools { device: Pool::new(Kind::Device), pinned: Pool::new(Kind::Pinned), kept: Arc::default() }
    }

    /// Keeps something alive as long as these pools.
    pub(crate) fn keep(&self, keep_alive: KeepAlive) {
        // What is kept is not freed, so no other thing gets its address. One that is given again is let go after the lock.
        let _again = self.kept.lock().insert(Arc::as_ptr(&keep_alive).addr(), keep_alive);
    }

    /// Whether a pool is one of these.
    pub(crate) fn has(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(pool, self.of(pool.kind))
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
    use super::{Arc, KeepAlive, Kind, Pool, Pools, rounded};

    #[test]
    fn f30_what_is_kept_goes_once_and_with_the_last_of_the_pools() {
        let (pools, one) = (Pools::new(), Arc::new(7));
        for _ in 0..3 {
            pools.keep(one.clone() as KeepAlive);
        }
        assert_eq!(Arc::strong_count(&one), 2);
        let other = pools.clone();
        drop(pools);
        assert_eq!(Arc::strong_count(&one), 2);
        drop(other);
        assert_eq!(Arc::strong_count(&one), 1);
    }

    #[test]
    fn a_pool_belongs_to_its_own_pools_only() {
        let pools = Pools::new();
        assert!(pools.has(&pools.device) && pools.clone().has(&pools.pinned));
        assert!(!pools.has(&Pool::new(Kind::Device)) && !Pools::new().has(&pools.device));
    }

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
