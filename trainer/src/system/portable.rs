//! Processes where the standard library is all there is. The ranks stay in the launcher's group, so that what the
//! terminal asks of it reaches them from there.

use std::io;
use std::process::{Child, Command, ExitStatus};

use super::Stop;

/// None: what asks this process to end, ends it.
#[derive(Debug)]
pub(crate) struct Signals;

impl Signals {
    #[expect(clippy::unnecessary_wraps, reason = "as on Unix")]
    pub(crate) fn new() -> io::Result<Signals> {
        Ok(Signals)
    }

    /// Those that came since the last call.
    #[expect(clippy::unused_self, reason = "as on Unix")]
    pub(crate) fn pending(&mut self) -> impl Iterator<Item = Stop> {
        std::iter::empty()
    }
}

/// Nothing has to be done so that [`stop`] reaches the process alone.
pub(crate) fn apart(_command: &mut Command) {}

/// Ends a process. It cannot be asked.
pub(crate) fn stop(process: &mut Child, _how: Stop) {
    // One that has just ended is found by who waits for it.
    let _ = process.kill();
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
    fn the_terminal_is_unknown() {
        assert_eq!(columns(), None);
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
