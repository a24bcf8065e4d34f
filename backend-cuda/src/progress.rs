//! Which op was running when a device failed.
//!
//! A failure shows at the next wait, long after the call that queued the work. So each kernel writes, when it begins, the
//! number of its launch to memory of the host; here is the list of which op had which number.

use std::collections::VecDeque;

use dropless_core::{Error, Queue, Result};
use parking_lot::Mutex;

use crate::BACKEND;
use crate::driver::{self, Address, Kind};

/// Launches whose names are kept: more than a device has queued at once.
const KEPT: usize = 1 << 16;

/// The launches of a device.
#[derive(Debug)]
pub(crate) struct Progress {
    /// One word for each queue, which the kernels write.
    words: Address,
    launches: Mutex<Launches>,
}

#[derive(Debug, Default)]
struct Launches {
    /// The number of the next one.
    next: u32,
    names: VecDeque<&'static str>,
}

const WORDS: usize = 3;

impl Progress {
    pub(crate) fn new() -> Result<Progress> {
        let unavailable = || Error::Unavailable { backend: BACKEND, why: "no pinned memory of the host".into() };
        let words = driver::allocate(Kind::Pinned, WORDS * size_of::<u32>())?.ok_or_else(unavailable)?;
        // Nothing has begun: the number before the first.
        // SAFETY: allocated above, and nobody else knows it yet.
        unsafe { std::slice::from_raw_parts_mut(words as *mut u32, WORDS) }.fill(u32::MAX);
        Ok(Progress { words, launches: Mutex::default() })
    }

    /// Where a kernel on `queue` writes its number, and the number.
    pub(crate) fn launch(&self, op: &'static str, queue: Queue) -> (Address, u32) {
        let mut launches = self.launches.lock();
        if launches.names.len() == KEPT {
            launches.names.pop_front();
        }
        launches.names.push_back(op);
        let number = launches.next;
        launches.next = number.wrapping_add(1);
        (self.words + (queue as usize * size_of::<u32>()) as Address, number)
    }

    /// The last op that began on `queue`.
    pub(crate) fn running(&self, queue: Queue) -> Option<&'static str> {
        let word = (self.words as *const u32).wrapping_add(queue as usize);
        // SAFETY: allocated in `new`; kernels write whole words.
        let number = unsafe { word.read_volatile() };
        let launches = self.launches.lock();
        let age = launches.next.wrapping_sub(number) as usize;
        (age > 0).then(|| launches.names.len().checked_sub(age)).flatten().map(|at| launches.names[at])
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        driver::release(Kind::Pinned, self.words);
    }
}
