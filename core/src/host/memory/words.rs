//! The bytes of a buffer: the host's own, or a caller's.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};

/// The bytes of a buffer. They begin at a multiple of the size of its tensor's elements.
pub(super) enum Words {
    /// The host's own.
    Own(Vec<u32>),
    /// A caller's.
    Lent(Lent),
}

/// Memory of a caller, which lives as long as what it came with.
pub(super) struct Lent {
    pointer: *mut u8,
    bytes: usize,
    _keep_alive: Arc<dyn Any + Send + Sync>,
}

// SAFETY: whoever lent the memory promised in `Lent::new` that it may be used from any thread.
unsafe impl Send for Lent {}
// SAFETY: as above; through a shared reference it is only read.
unsafe impl Sync for Lent {}

impl Lent {
    /// # Safety
    /// `pointer` must not be null, and `bytes` bytes from there on, which hold any values, must be there to read and write,
    /// from any thread, until `keep_alive` is dropped. Nobody else may write them while [`Words::bytes`] is borrowed
    /// from, nor read or write them while [`Words::bytes_mut`] is.
    pub(super) unsafe fn new(pointer: *mut u8, bytes: usize, keep_alive: Arc<dyn Any + Send + Sync>) -> Lent {
        Lent { pointer, bytes, _keep_alive: keep_alive }
    }
}

impl Words {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Words::Own(words) => cast_slice(words),
            // SAFETY: the promise in `Lent::new`; whoever it lives for is kept alive by `self`.
            Words::Lent(lent) => unsafe { std::slice::from_raw_parts(lent.pointer, lent.bytes) },
        }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Words::Own(words) => cast_slice_mut(words),
            // SAFETY: as above, and `self` is borrowed by nobody else.
            Words::Lent(lent) => unsafe { std::slice::from_raw_parts_mut(lent.pointer, lent.bytes) },
        }
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = if matches!(self, Words::Own(_)) { "own" } else { "lent" };
        write!(f, "{} bytes, {whose}", self.bytes().len())
    }
}
