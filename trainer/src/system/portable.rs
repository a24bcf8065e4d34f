//! Processes where there is little more than the standard library: Ctrl-C is all that can ask one to end. The ranks stay
//! in the launcher's group, so that what the terminal asks of it reaches them from there.

use std::io;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::consts::SIGINT;

use super::Stop;

/// How soon Ctrl-C is noticed.
const POLL: Duration = Duration::from_millis(50);

/// Ctrl-C in the terminal of this process, from now on.
#[derive(Debug)]
pub(crate) struct Signals(Arc<AtomicBool>);

impl Signals {
    pub(crate) fn new() -> io::Result<Signals> {
        let flag = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGINT, flag.clone())?;
        Ok(Signals(flag))
    }

    /// Those that came since the last call.
    pub(crate) fn pending(&mut self) -> impl Iterator<Item = Stop> {
        self.0.swap(false, Ordering::Relaxed).then_some(Stop::Interrupt).into_iter()
    }
}

/// Where files have no limit of their own there is nothing to do.
pub(crate) fn write_to_the_limit() -> io::Result<()> {
    Ok(())
}

/// Where there is no limit to be raised there is nothing to do.
pub(crate) fn open_to_the_limit() {}

/// From now on, calls `heard` for each Ctrl-C, on a thread of its own.
pub(crate) fn listen(mut heard: impl FnMut(Stop) + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new()?;
    let listener = move || {
        loop {
            signals.pending().for_each(&mut heard);
            std::thread::sleep(POLL);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(listener).map(drop)
}

/// Ends this process at once, with the code that a shell gives to Ctrl-C.
pub(crate) fn end(_how: Stop) -> ! {
    std::process::exit(128 + SIGINT)
}

/// The exit code of a process that Ctrl-C ended at once.
pub(crate) fn ended(_how: Stop) -> u8 {
    u8::try_from(128 + SIGINT).unwrap_or(1)
}

/// Who else may read a file is unknown here.
pub(crate) fn open_to_others(_path: &Path) -> Option<u32> {
    None
}

/// Nothing has to be done so that [`stop`] reaches the process alone.
pub(crate) fn apart(_command: &mut Command) {}

/// Ends a process, which cannot be asked; but the terminal, which asked this process, asked all of its group.
pub(crate) fn stop(process: &mut Child, how: Stop) {
    if how != Stop::Interrupt {
        // One that has just ended is found by who waits for it.
        let _ = process.kill();
    }
}

/// Columns of the terminal at the standard error; unknown here.
pub(crate) fn columns() -> Option<u16> {
    None
}

/// The exit code; 1 if there is none.
pub(crate) fn code(status: ExitStatus) -> u8 {
    status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This test program, which can do nothing but list its tests or run them all.
    fn program(argument: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg(argument).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        apart(&mut command);
        command
    }

    #[test]
    fn nothing_is_heard_without_a_signal() {
        let (heard, hears) = std::sync::mpsc::channel();
        listen(move |how| heard.send(how).unwrap()).unwrap();
        write_to_the_limit().unwrap();
        open_to_the_limit();
        assert!(hears.recv_timeout(3 * POLL).is_err());
        // It cannot be called without ending the tests.
        let _: fn(Stop) -> ! = end;
    }

    #[test]
    fn the_terminal_and_other_users_are_unknown() {
        assert_eq!((columns(), open_to_others(Path::new("/"))), (None, None));
        assert_eq!(ended(Stop::Interrupt), 130);
    }

    #[test]
    fn codes_are_passed_on_and_what_is_stopped_has_one() {
        assert_eq!(code(program("--list").status().unwrap()), 0);
        assert_eq!(code(program("--no-such-option").status().unwrap()), 101);
        let mut running = program("--list").stdin(std::process::Stdio::piped()).spawn().unwrap();
        stop(&mut running, Stop::Kill);
        let ended = running.wait().unwrap();
        assert!(ended.success() || code(ended) == 1, "{ended}");
        // It has ended, and that is no failure.
        stop(&mut running, Stop::Terminate);
        assert_eq!(Signals::new().unwrap().pending().next(), None);
    }
}
