//! Processes and signals on Unix. Each rank leads a process group of its own, so that a signal from the terminal reaches
//! it once, through the launcher, and ending a rank ends what it started.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;

use rustix::process::{Pid, Resource, Signal, getrlimit, kill_process_group, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::iterator;
use signal_hook::low_level::emulate_default_handler;

use super::Stop;

/// Signals to this process that ask it to end, from now on.
#[derive(Debug)]
pub(crate) struct Signals(iterator::Signals);

/// The signals that ask a process to end.
const ASKING: [i32; 3] = [SIGINT, SIGTERM, SIGUSR1];

fn asked(number: i32) -> Stop {
    match number {
        SIGINT => Stop::Interrupt,
        SIGUSR1 => Stop::User,
        _ => Stop::Terminate,
    }
}

impl Signals {
    pub(crate) fn new() -> io::Result<Signals> {
        Ok(Signals(iterator::Signals::new(ASKING)?))
    }

    /// Those that came since the last call.
    pub(crate) fn pending(&mut self) -> impl Iterator<Item = Stop> {
        self.0.pending().map(asked)
    }
}

/// Bytes of address space that this process may still take, where that is limited (`ulimit -v`).
pub(crate) fn address_space() -> Option<u64> {
    let most = getrlimit(Resource::As).current?;
    #[cfg(target_os = "linux")]
    let reserved = super::linux::reserved().unwrap_or(0);
    #[cfg(not(target_os = "linux"))]
    let reserved = 0;
    Some(most.saturating_sub(reserved))
}

/// From now on, a file that may grow no more (`ulimit -f`) is an error of the write, as on a full disk, and not the end of
/// this process.
pub(crate) fn write_to_the_limit() -> io::Result<()> {
    // What matters is that somebody hears the signal.
    signal_hook::flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// From now on, this process may have as many files open as the system lets it: a checkpoint of many ranks has many.
pub(crate) fn open_to_the_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // One that cannot be raised stays, and is an error of the file that is one too many.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// From now on, calls `heard` for each signal that asks this process to end, on a thread of its own.
pub(crate) fn listen(mut heard: impl FnMut(Stop) + Send + 'static) -> io::Result<()> {
    let mut signals = iterator::Signals::new(ASKING)?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || signals.forever().for_each(|number| heard(asked(number))))
        .map(drop)
}

/// Ends this process at once, as the signal would have if nobody had listened.
pub(crate) fn end(how: Stop) -> ! {
    let number = number(how);
    let _ = emulate_default_handler(number);
    std::process::exit(128 + number)
}

const fn number(how: Stop) -> i32 {
    match how {
        Stop::Interrupt => SIGINT,
        Stop::User => SIGUSR1,
        Stop::Terminate | Stop::Kill => SIGTERM,
    }
}

/// The exit code of a process that the signal ended at once, as shells have it.
pub(crate) fn ended(how: Stop) -> u8 {
    u8::try_from(128 + number(how)).unwrap_or(1)
}

/// The permissions of a file that others than its owner have, if they have any.
pub(crate) fn open_to_others(path: &Path) -> Option<u32> {
    let mode = std::fs::metadata(path).ok()?.mode() & 0o777;
    (mode & 0o077 != 0).then_some(mode)
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
        Stop::User => Signal::USR1,
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
