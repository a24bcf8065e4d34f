//! Processes and signals on Unix. Each rank leads a process group of its own, so that a signal from the terminal reaches
//! it once, through the launcher, and ending a rank ends what it started.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::Stop;

/// Signals to this process that ask it to end, from now on.
#[derive(Debug)]
pub(crate) struct Signals(signal_hook::iterator::Signals);

impl Signals {
    pub(crate) fn new() -> io::Result<Signals> {
        Ok(Signals(signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?))
    }

    /// Those that came since the last call.
    pub(crate) fn pending(&mut self) -> impl Iterator<Item = Stop> {
        self.0.pending().map(|number| if number == SIGINT { Stop::Interrupt } else { Stop::Terminate })
    }
}

/// Bytes of address space that this process may still take, where that is limited (`ulimit -v`).
pub(crate) fn address_space() -> Option<u64> {
    let most = rustix::process::getrlimit(rustix::process::Resource::As).current?;
    #[cfg(target_os = "linux")]
    let reserved = super::linux::reserved().unwrap_or(0);
    #[cfg(not(target_os = "linux"))]
    let reserved = 0;
    Some(most.saturating_sub(reserved))
}

/// Makes the process that will be started one that [`stop`] reaches alone, with what it starts.
pub(crate) fn apart(command: &mut Command) {
    command.process_group(0);
    // A launcher that is killed must not leave ranks behind that hold the GPUs.
    #[cfg(target_os = "linux")]
    // SAFETY: between fork and exec this makes one system call; it neither allocates nor takes a lock.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?));
    }
}

/// Asks a process and what it started to end, or ends them.
pub(crate) fn stop(process: &mut Child, how: Stop) {
    let signal = match how {
        Stop::Interrupt => Signal::INT,
        Stop::Terminate => Signal::TERM,
        Stop::Kill => Signal::KILL,
    };
    // One that has just ended is found by who waits for it.
    let _ = kill_process_group(Pid::from_child(process), signal);
}

/// Columns of the terminal at the standard error.
pub(crate) fn columns() -> Option<u16> {
    rustix::termios::tcgetwinsize(io::stderr()).ok().map(|size| size.ws_col).filter(|&columns| columns > 0)
}

/// The exit code, or 128 + the signal that ended the process, as shells have it.
pub(crate) fn code(status: ExitStatus) -> u8 {
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}
