//! Words by which the kernels of an exchange tell the host how far they have come, without anyone waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dropless_core::{DType, Memory, Queue, Result, Tensor};

use crate::device::Gpu;
use crate::memory;

/// Declares numbers once for Rust and for the kernels, which get them as constants.
macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)+) => {
        $($(#[$doc])*
        #[allow(dead_code, reason = "some are the kernels' alone")]
        pub(crate) const $name: u32 = $value;)+
        /// The names, as a kernel declares its constants.
        pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),+];
        /// The values, as a launch gives them.
        pub(crate) const VALUES: &[u32] = &[$($value),+];
    };
}

numbers! {
    /// Word of board and state: exchanges that have begun.
    BEGUN = 0;
    /// Word of board and state: exchanges that have ended.
    ENDED = 1;
    /// Word of the state: not 0 when no exchange may move anything any more.
    FAILED = 2;
    /// Word of the state: blocks of the present launch that are done.
    ARRIVED = 3;
    /// Word of the state: rounds through mapped memory so far.
    SEQUENCE = 4;
    /// Word of the board: the host wants all exchanges to end.
    STOP = 2;
    /// Word of the board: what went wrong, one of the faults below; 0 for nothing.
    FAULT = 3;
    /// Word of the board: the member with whom it went wrong.
    FAULT_PLACE = 4;
    /// Word of the board: what was found.
    FAULT_FOUND = 5;
    /// Word of the board: what was expected.
    FAULT_EXPECTED = 6;
    /// The member sends another number of rows than is expected.
    FAULT_ROWS = 1;
    /// Its segments have another capacity.
    FAULT_CAPACITY = 2;
    /// Its rows have another length.
    FAULT_ROW_BYTES = 3;
    /// It sends more rows than a segment holds.
    FAULT_OVERFLOW = 4;
    /// Words of a header.
    HEADER = 4;
    /// Words of a member's entry in a window.
    ENTRY = 16;
}

/// Words of a board, and of a state.
const WORDS: usize = 8;

/// A board.
#[derive(Debug)]
pub(crate) struct Board {
    words: Tensor,
    address: usize,
}

/// What a kernel found to be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) code: u32,
    pub(super) place: usize,
    pub(super) found: u32,
    pub(super) expected: u32,
}

impl Board {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Board> {
        let words = memory::alloc(gpu, DType::U32, &[WORDS], Memory::Host)?;
        // The block may be one that the device has yet to finish with, so the zeros come in the order of its queues; they
        // are there when the call returns.
        memory::write("all_to_all", gpu, &words, &[0; WORDS * 4])?;
        let address = memory::addresses("all_to_all", gpu, &words, Queue::Comm)?.start;
        Ok(Board { words, address: usize::try_from(address).expect("an address of the host") })
    }

    /// The words for a kernel.
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.words
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < WORDS);
        // SAFETY: pinned memory of this many words, aligned, as long as the tensor lives; `new` waited until it was zeroed,
        // and since then the host touches it by atomics only.
        unsafe { AtomicU32::from_ptr((self.address as *mut u32).add(index)) }
    }

    fn get(&self, word: u32) -> u32 {
        self.word(word as usize).load(Ordering::Acquire)
    }

    /// Exchanges that have begun, and that have ended.
    pub(super) fn progress(&self) -> (u32, u32) {
        // In this order, so that none seems to have ended before it began.
        let ended = self.get(ENDED);
        (self.get(BEGUN), ended)
    }

    pub(super) fn fault(&self) -> Option<Fault> {
        let code = self.get(FAULT);
        let [place, found, expected] = [FAULT_PLACE, FAULT_FOUND, FAULT_EXPECTED].map(|word| self.get(word));
        (code != 0).then_some(Fault { code, place: place as usize, found, expected })
    }

    /// Ends the kernels that wait for other members.
    pub(super) fn stop(&self) {
        self.word(STOP as usize).store(1, Ordering::Release);
    }
}

/// The state of a group: words in the memory of the device, 0 at first.
pub(super) fn new_state(gpu: &Arc<Gpu>) -> Result<Tensor> {
    let state = gpu.alloc(DType::U32, &[WORDS])?;
    memory::write("all_to_all", gpu, &state, &[0; WORDS * 4])?;
    Ok(state)
}
