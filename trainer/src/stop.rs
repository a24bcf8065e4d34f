//! Asking a run to stop: by a signal, or after a time. The run ends the step it is at, writes a checkpoint, and can be
//! resumed with the bits of one that was never stopped.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crate::system;

/// Why a run stops before its last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Reason {
    /// The time limit has passed.
    TimeLimit = 1,
    /// SIGINT: Ctrl-C.
    Interrupt = 2,
    /// SIGTERM.
    Terminate = 3,
    /// SIGUSR1, which schedulers can send some time before they end a job.
    User = 4,
}

impl Reason {
    const ALL: [Reason; 4] = [Reason::TimeLimit, Reason::Interrupt, Reason::Terminate, Reason::User];

    /// A number for it; 0 stands for none.
    pub(crate) const fn code(reason: Option<Reason>) -> u8 {
        match reason {
            Some(reason) => reason as u8,
            None => 0,
        }
    }

    /// What the number stands for.
    pub(crate) fn of(code: u8) -> Option<Reason> {
        Reason::ALL.into_iter().find(|&reason| reason as u8 == code)
    }

    const fn asked(how: system::Stop) -> Reason {
        match how {
            system::Stop::Interrupt => Reason::Interrupt,
            system::Stop::User => Reason::User,
            system::Stop::Terminate | system::Stop::Kill => Reason::Terminate,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::TimeLimit => "the time limit",
            Reason::Interrupt => "SIGINT",
            Reason::Terminate => "SIGTERM",
            Reason::User => "SIGUSR1",
        })
    }
}

/// A request to stop, shared by whoever makes it and the ranks of this process.
#[derive(Clone, Debug, Default)]
pub struct Request {
    shared: Arc<Shared>,
    deadline: Option<Instant>,
}

#[derive(Debug, Default)]
struct Shared {
    asked: AtomicU8,
    stopped: AtomicU8,
    /// Whether there is a step to end.
    training: AtomicBool,
}

impl Request {
    /// One that is made when `limit` has passed from now.
    pub fn after(limit: Duration) -> Request {
        // A time beyond what the clock can say never comes.
        Request { shared: Arc::default(), deadline: Instant::now().checked_add(limit) }
    }

    /// Makes the request.
    pub fn ask(&self, reason: Reason) {
        self.shared.asked.store(Reason::code(Some(reason)), Ordering::Relaxed);
    }

    /// Why a run is to stop, if it is. A signal is the reason even after the time limit.
    pub fn asked(&self) -> Option<Reason> {
        let late = self.deadline.filter(|&deadline| Instant::now() >= deadline).map(|_| Reason::TimeLimit);
        Reason::of(self.shared.asked.load(Ordering::Relaxed)).or(late)
    }

    /// Why the run was stopped; on every rank that drove it, whichever rank was asked.
    pub fn stopped(&self) -> Option<Reason> {
        Reason::of(self.shared.stopped.load(Ordering::Relaxed))
    }

    /// All ranks stop, for this reason.
    pub(crate) fn stop(&self, reason: Reason) {
        self.shared.stopped.store(Reason::code(Some(reason)), Ordering::Relaxed);
    }

    /// There is a step to end from now on, or none any more.
    pub(crate) fn set_training(&self, training: bool) {
        self.shared.training.store(training, Ordering::Relaxed);
    }

    /// From now on, a signal makes the request. Where there is no step to end, before the first and after the last, and when
    /// it is the second signal, it ends the process at once. `said` is told about the first.
    ///
    /// # Errors
    /// The system's, when it does not let signals be listened to.
    pub(crate) fn listen(&self, said: impl Fn(Reason) + Send + 'static) -> std::io::Result<()> {
        let (request, mut first) = (self.clone(), None::<Instant>);
        system::listen(move |how| {
            let reason = Reason::asked(how);
            match first {
                _ if !request.shared.training.load(Ordering::Relaxed) => system::end(how),
                None => {
                    first = Some(Instant::now());
                    request.ask(reason);
                    said(reason);
                }
                Some(first) if first.elapsed() < SAME => {}
                Some(_) => system::end(how),
            }
        })
    }
}

/// Signals that come together are one: `timeout` sends its signal to the process, and to the group which the process is in.
pub(crate) const SAME: Duration = Duration::from_millis(300);

/// A duration as `2h30m` or `90s`: numbers with the units d, h, m and s, the larger ones first.
///
/// # Errors
/// What was expected.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    const UNITS: [(char, u64); 4] = [('d', 86_400), ('h', 3_600), ('m', 60), ('s', 1)];
    let expected = || "expected a duration such as 2h30m, 45m or 90s".to_owned();
    let (mut rest, mut seconds, mut units) = (text, 0u64, &UNITS[..]);
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(expected)?;
        let (number, unit) = (rest[..end].parse::<u64>().map_err(|_| expected())?, rest[end..].chars().next());
        let at = units.iter().position(|&(name, _)| Some(name) == unit).ok_or_else(expected)?;
        let more = number.checked_mul(units[at].1).and_then(|more| seconds.checked_add(more));
        (seconds, units, rest) = (more.ok_or_else(expected)?, &units[at + 1..], &rest[end + 1..]);
    }
    if seconds == 0 { Err(expected()) } else { Ok(Duration::from_secs(seconds)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        let seconds = |text| duration(text).map(|d| d.as_secs()).ok();
        assert_eq!(["90s", "2h30m", "1d1h1m1s", "45m"].map(seconds), [90, 9000, 90_061, 2700].map(Some));
        for text in ["", "90", "0s", "s", "5m2h", "1h1h", "2 h", "-1s", "1.5h", "9999999999999999d", "é"] {
            assert_eq!(seconds(text), None, "{text}");
        }
    }

    #[test]
    fn a_signal_is_the_reason_before_the_time_limit() {
        let request = Request::after(Duration::ZERO);
        assert_eq!((request.asked(), request.stopped()), (Some(Reason::TimeLimit), None));
        request.clone().ask(Reason::User);
        assert_eq!(request.asked(), Some(Reason::User));
        assert_eq!(Request::after(Duration::MAX).asked(), None);
        assert!(Reason::ALL.into_iter().all(|reason| Reason::of(Reason::code(Some(reason))) == Some(reason)));
    }
}
