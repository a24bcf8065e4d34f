//! What the program writes to its standard output and error. Nothing else in it writes there.
//!
//! Each of the two has a thread that writes, so that neither one that is closed or full nor one that nobody reads ends or
//! holds a run: a line is waited for a moment, so that lines keep their order, and when that is not enough, lines wait in
//! memory, and the newest are left out when they are too many. What a command was asked to print is waited for.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dropless_core::escape::escaped;
use dropless_model::words::count;

/// How long a line is waited for, as long as the one before it went out.
const MOMENT: Duration = Duration::from_millis(200);
/// How long the end of the program waits for a reader who takes nothing.
const END: Duration = Duration::from_secs(3);
/// How soon a stream that takes nothing now is tried again.
const AGAIN: Duration = Duration::from_millis(10);
/// Bytes that wait at most.
const MOST: usize = 1 << 20;

static OUTPUT: Stream = Stream::new(|| Box::new(io::stdout()));
static ERROR: Stream = Stream::new(|| Box::new(io::stderr()));

/// Starts the threads, without which nothing can be said.
///
/// # Errors
/// The system gives none.
pub(crate) fn start() -> io::Result<()> {
    [&ERROR, &OUTPUT].into_iter().try_for_each(|stream| stream.start(&mut stream.state()))
}

/// Writes the one line of a program that ends because it has no thread to write with.
pub(crate) fn tell_alone(line: impl Display) {
    // There is no other place where this could be said.
    let _ = deliver(&mut io::stderr(), format!("{}\n", escaped(&line.to_string())).as_bytes());
}

/// Prints a line to the standard output. Never waits for a reader.
pub(crate) fn say(line: impl Display) {
    OUTPUT.put(format!("{}\n", escaped(&line.to_string())).into_bytes(), Some(MOMENT));
}

/// Prints a line to the standard error. Never waits for a reader.
pub(crate) fn tell(line: impl Display) {
    ERROR.put(format!("{}\n", escaped(&line.to_string())).into_bytes(), Some(MOMENT));
}

/// Passes a line of another process on to the standard error, as it is. Never waits for a reader.
pub(crate) fn relay(line: &str) {
    ERROR.put(format!("{line}\n").into_bytes(), Some(MOMENT));
}

/// Prints the lines that a command was asked for.
pub(crate) fn report(lines: impl Display) {
    let lines = lines.to_string();
    let lines: String = lines.lines().map(|line| format!("{}\n", escaped(line))).collect();
    show(lines.as_bytes());
}

/// Prints what a command was asked for, as it is.
pub(crate) fn show(bytes: &[u8]) {
    OUTPUT.put(bytes.to_vec(), None);
}

/// Waits for everything to be written, but not for a reader who takes nothing.
pub(crate) fn finish() {
    OUTPUT.finish();
    ERROR.finish();
}

/// Draws on the standard error, by control sequences, none of which has to arrive. Never waits for a reader.
pub(crate) fn draw(sequence: String) {
    if !ERROR.state().behind {
        ERROR.put(sequence.into_bytes(), Some(MOMENT));
    }
}

/// Whether there is somebody to [`draw`] for.
pub(crate) fn drawable() -> bool {
    io::stderr().is_terminal()
}

/// [`show`] as a writer.
#[derive(Debug)]
pub(crate) struct Shown;

impl Write for Shown {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        show(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Where bytes go, and those that wait for it.
struct Stream {
    open: fn() -> Box<dyn Write>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    waiting: VecDeque<Vec<u8>>,
    /// Bytes in `waiting` and of what is being written.
    bytes: usize,
    /// Pieces that came, and those that were written or could not be.
    came: u64,
    gone: u64,
    /// Lines that were left out since the last one that was not.
    left_out: u64,
    /// A line took longer than its moment, and it or another one is still there.
    behind: bool,
    /// The thread runs.
    started: bool,
}

impl Stream {
    const fn new(open: fn() -> Box<dyn Write>) -> Stream {
        let state =
            State { waiting: VecDeque::new(), bytes: 0, came: 0, gone: 0, left_out: 0, behind: false, started: false };
        Stream { open, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&'static self, state: &mut State) -> io::Result<()> {
        if !state.started {
            std::thread::Builder::new().name("output".into()).spawn(|| self.write())?;
            state.started = true;
        }
        Ok(())
    }

    /// Writes a piece; waits until it is written, for so long, if something was said.
    fn put(&'static self, piece: Vec<u8>, patience: Option<Duration>) {
        let mut state = self.state();
        // Without a thread there is no way to write that cannot hold a run.
        let Ok(()) = self.start(&mut state) else { return };
        if patience.is_some() && state.bytes > 0 && state.bytes + piece.len() > MOST {
            state.left_out += 1;
            return;
        }
        state.bytes += piece.len();
        state.came += 1;
        let number = state.came;
        state.waiting.push_back(piece);
        self.changed.notify_all();
        let ahead = |state: &mut State| state.gone < number;
        match patience {
            None => drop(self.changed.wait_while(state, ahead)),
            Some(_) if state.behind => {}
            Some(moment) => {
                let waited = self.changed.wait_timeout_while(state, moment, ahead);
                let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                state.behind |= timeout.timed_out();
            }
        }
    }

    /// The thread.
    fn write(&self) {
        let mut stream = (self.open)();
        loop {
            let waits = |state: &mut State| state.waiting.is_empty();
            let mut state = self.changed.wait_while(self.state(), waits).unwrap_or_else(PoisonError::into_inner);
            let Some(piece) = state.waiting.pop_front() else { continue };
            drop(state);
            // What cannot be written is lost; the next piece is tried again, as a disk may have room then.
            let _ = deliver(&mut *stream, &piece);
            let mut state = self.state();
            state.bytes -= piece.len();
            state.gone += 1;
            if state.waiting.is_empty() {
                state.behind = false;
                if state.left_out > 0 {
                    let notice =
                        format!("note: left out here, as nobody read them: {}\n", count(state.left_out, "line"));
                    state.left_out = 0;
                    state.bytes += notice.len();
                    state.came += 1;
                    state.waiting.push_back(notice.into_bytes());
                }
            }
            self.changed.notify_all();
        }
    }

    fn finish(&self) {
        let mut state = self.state();
        while state.gone < state.came {
            let before = state.gone;
            let waited = self.changed.wait_timeout_while(state, END, |state| state.gone == before);
            let timeout;
            (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                return;
            }
        }
    }
}

/// Writes all bytes, also to a stream that does not block.
fn deliver(stream: &mut dyn Write, mut bytes: &[u8]) -> io::Result<()> {
    loop {
        let taken = if bytes.is_empty() { stream.flush().map(|()| 0) } else { stream.write(bytes) };
        match taken {
            Ok(_) if bytes.is_empty() => return Ok(()),
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(taken) => bytes = &bytes[taken..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(AGAIN),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    use super::*;

    /// A stream that takes a piece whenever the test says so.
    struct Gate(Receiver<()>, Sender<Vec<u8>>);

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.recv().map_err(|_| io::Error::from(ErrorKind::BrokenPipe))?;
            self.1.send(bytes.to_vec()).map_err(|_| io::Error::from(ErrorKind::BrokenPipe))?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn f05_a_stream_that_nobody_reads_holds_nothing_and_says_what_was_left_out() {
        static GATE: Mutex<Option<Gate>> = Mutex::new(None);
        static HELD: Stream = Stream::new(|| Box::new(GATE.lock().unwrap().take().unwrap()));
        let ((open, gate), (written, read)) = (channel(), channel());
        *GATE.lock().unwrap() = Some(Gate(gate, written));
        let started = Instant::now();
        let line = vec![b'x'; MOST / 4];
        for _ in 0..100 {
            HELD.put(line.clone(), Some(MOMENT));
        }
        assert!(started.elapsed() < 10 * MOMENT, "{:?}", started.elapsed());
        assert!(HELD.state().bytes <= MOST);
        for _ in 0..5 {
            open.send(()).unwrap();
        }
        HELD.finish();
        let read: Vec<Vec<u8>> = read.try_iter().collect();
        assert_eq!(read.len(), 5);
        assert_eq!(read[4], b"note: left out here, as nobody read them: 96 lines\n");
        // As soon as it takes something again, a line is waited for, so that it keeps its place.
        assert!(!HELD.state().behind);
    }

    #[test]
    fn f05_a_stream_that_fails_is_tried_again_and_ends_nothing() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        static FULL: Stream = Stream::new(|| Box::new(Full));
        for _ in 0..3 {
            FULL.put(b"a line\n".to_vec(), None);
        }
        FULL.finish();
        let state = FULL.state();
        assert_eq!((state.gone, state.behind), (3, false));
    }
}
