//! What the program asks of the system beyond the standard library: the machine's memory and processor, and processes
//! as the ranks of a launch, and what asks this process to end.
//!
//! Calls of one system stand here and nowhere else, behind `cfg`, with a portable way beside each; a test holds the
//! sources to that. `--cfg dropless_portable` takes the portable way on every system, so that it is compiled and tested
//! where there is no other machine.

#[cfg(all(target_os = "linux", not(dropless_portable)))]
mod cgroup;
#[cfg(all(target_os = "linux", not(dropless_portable)))]
mod linux;
mod machine;
#[cfg(any(test, not(unix), dropless_portable))]
mod portable;
#[cfg(all(unix, not(dropless_portable)))]
mod unix;

pub(crate) use machine::{Limit, installed, memory_limit, peak, processor};
#[cfg(any(not(unix), dropless_portable))]
pub(crate) use portable::{
    Signals, apart, code, columns, end, ended, listen, open_to_others, open_to_the_limit, stop, write_to_the_limit,
};
#[cfg(all(unix, not(dropless_portable)))]
pub(crate) use unix::{
    Signals, apart, code, columns, end, ended, listen, open_to_others, open_to_the_limit, stop, write_to_the_limit,
};

/// What is asked of a process and of those that it started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// To end, as a terminal asks.
    Interrupt,
    /// To end, as a scheduler asks some time before it ends the job.
    #[cfg_attr(any(not(unix), dropless_portable), allow(dead_code, reason = "only Unix has such a signal"))]
    User,
    /// To end.
    Terminate,
    /// Nothing: it is ended.
    Kill,
}
