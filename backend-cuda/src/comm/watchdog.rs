//! Ends this rank, with the reason, when the ranks cannot go on together.
//!
//! A thread looks at the connections to the other ranks and at the progress of the exchanges. An exchange that has begun
//! must end within a time, in which no rank is busy; when one does not, when another rank fails, is gone or is silent for
//! as long, or when NCCL or a kernel reports a fault, all ranks learn the reason, the exchanges under way are broken off,
//! and what waits for them gets an error. If this process then still does not react, because it is busy or a driver's call
//! does not return, it is ended.
//!
//! Nothing else ends an exchange that waits: its kernels have no limit of their own.

use std::io::{self, Write};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dropless_core::escape::escaped;
use dropless_core::{Error, Result};
use parking_lot::{Condvar, Mutex};

use super::control::{Control, Ended};

/// How often the watchdog looks.
const POLL: Duration = Duration::from_millis(20);
/// How long a process has to react to an error, at most.
const GRACE: Duration = Duration::from_secs(10);
/// How long a process that is ended has for that: on its way out it asks the driver, which may not answer there either.
const EXIT: Duration = Duration::from_secs(1);
/// How long the reason may take to be printed.
const SAY: Duration = Duration::from_secs(1);
/// How often the ranks ask each other whether they are there, at the least: once in this time, and this often in the
/// time after which their silence is a failure.
const ASK: (Duration, u32) = (Duration::from_secs(1), 10);

/// The exchanges of a group, as far as the watchdog knows them.
pub(super) trait Watched: Send + Sync {
    /// The group, in words.
    fn name(&self) -> String;
    /// Index of the group in [`Ended`].
    fn index(&self) -> usize;
    /// The ranks in it.
    fn members(&self) -> &[usize];
    /// Exchanges that have begun, and that have ended; modulo 2^32.
    fn progress(&self) -> (u32, u32);
    /// What has gone wrong.
    fn fault(&self) -> Option<String>;
    /// Breaks off what is under way. May take long.
    fn break_off(&self);
}

/// A watchdog, until it is dropped.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    rank: usize,
    control: Arc<Control>,
    /// The longest that an exchange may take while no rank is busy, and the longest that a rank may be silent.
    limit: Duration,
    grace: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    groups: Vec<Arc<dyn Watched>>,
    /// Why this rank cannot go on.
    failure: Option<String>,
    /// The reason has reached a caller, or nobody needs it any more.
    settled: bool,
}

impl std::fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watchdog").field("limit", &self.shared.limit).finish_non_exhaustive()
    }
}

impl Watchdog {
    /// Every rank of the job ends within `timeout` of the moment at which the first exchange gets stuck, or the first rank
    /// is silent.
    ///
    /// # Errors
    /// The system has no threads for the watch.
    pub(super) fn new(rank: usize, control: Arc<Control>, timeout: Duration) -> io::Result<Watchdog> {
        let grace = GRACE.min(timeout / 2);
        let limit = timeout - grace;
        control.ask(ASK.0.min(limit / ASK.1))?;
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { rank, control, limit, grace, state, changed });
        let watching = shared.clone();
        let thread = std::thread::Builder::new().name("watchdog".into()).spawn(move || watching.watch())?;
        Ok(Watchdog { shared, thread: Some(thread) })
    }

    /// Looks at a group, too, from now on.
    pub(super) fn add(&self, group: Arc<dyn Watched>) {
        self.shared.state.lock().groups.push(group);
    }

    /// Whether the ranks can go on together.
    ///
    /// # Errors
    /// [`Error::Collective`] when they cannot.
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        let mut state = self.shared.state.lock();
        let Some(what) = state.failure.clone() else { return Ok(()) };
        state.settled = true;
        self.shared.changed.notify_all();
        Err(Error::Collective { rank: self.shared.rank, op, what })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.state.lock().settled = true;
        self.shared.changed.notify_all();
        // A panic there has been printed.
        self.thread.take().map(JoinHandle::join);
    }
}

/// Prints to the standard error, which may be closed or full, or have no reader: that ends nothing and holds nothing.
/// Nothing is printed where there is no thread for it.
fn say(line: String) {
    let (done, said) = std::sync::mpsc::channel();
    let saying = std::thread::Builder::new().name("last words".into()).spawn(move || {
        let _ = io::stderr().write_all(line.as_bytes());
        let _ = done.send(());
    });
    if saying.is_ok() {
        let _ = said.recv_timeout(SAY);
    }
}

/// An exchange of a group that has begun and has not ended.
struct Pending {
    number: u32,
    since: Instant,
}

impl Shared {
    fn watch(&self) {
        let mut pending = Vec::new();
        let why = loop {
            if self.settled_within(POLL) {
                return;
            }
            if let Some(why) = self.look(&mut pending) {
                break why;
            }
        };
        self.state.lock().failure = Some(why.clone());
        self.control.report(&why);
        for group in self.state.lock().groups.clone() {
            // What nobody breaks off ends with the process.
            let _ = std::thread::Builder::new().name("break off".into()).spawn(move || group.break_off());
        }
        if !self.settled_within(self.grace) {
            let limited = std::thread::Builder::new().name("limit".into()).spawn(|| {
                std::thread::sleep(SAY + EXIT);
                std::process::abort();
            });
            let error = Error::Collective { rank: self.rank, op: "all_to_all", what: why }.to_string();
            say(format!("error: {}\n", escaped(&error)));
            if limited.is_err() {
                // The way out may be blocked, and nobody would end it.
                std::process::abort();
            }
            std::process::exit(1);
        }
    }

    /// Whether the watch is over.
    fn settled_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        let mut state = self.state.lock();
        while !state.settled && !self.changed.wait_until(&mut state, deadline).timed_out() {}
        state.settled
    }

    /// A reason why this rank cannot go on.
    fn look(&self, pending: &mut Vec<Option<Pending>>) -> Option<String> {
        if let Some(why) = self.control.failure() {
            return Some(why);
        }
        if let Some(rank) = self.control.silent(self.limit) {
            return Some(format!("rank {rank} has not been heard of for {:?}", self.limit));
        }
        let groups = self.state.lock().groups.clone();
        pending.resize_with(groups.len(), || None);
        let left = self.control.left();
        groups.iter().zip(pending).find_map(|(group, pending)| {
            let (begun, ended) = group.progress();
            group
                .fault()
                .or_else(|| left_behind(&**group, begun, &left))
                .or_else(|| self.stuck(&**group, begun, ended, pending))
        })
    }

    /// Whether an exchange takes too long.
    fn stuck(&self, group: &dyn Watched, begun: u32, ended: u32, pending: &mut Option<Pending>) -> Option<String> {
        if begun == ended {
            *pending = None;
            return None;
        }
        // Whoever is busy: a member may wait in another group for a rank that is not in this one.
        let present = pending.take_if(|pending| pending.number == begun && !self.control.anyone_busy());
        let present = present.unwrap_or_else(|| Pending { number: begun, since: Instant::now() });
        let late = present.since.elapsed() > self.limit;
        *pending = Some(present);
        late.then(|| format!("exchange {begun} of {} has not ended within {:?}", group.name(), self.limit))
    }
}

/// Whether an exchange waits for a rank that has ended its last one before.
fn left_behind(group: &dyn Watched, begun: u32, left: &[(usize, Ended)]) -> Option<String> {
    left.iter().find_map(|(rank, ended)| {
        let ahead = begun.wrapping_sub(ended[group.index()]).cast_signed();
        let waits = group.members().contains(rank) && ahead > 0;
        waits.then(|| format!("rank {rank} left before exchange {begun} of {}", group.name()))
    })
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;
    use crate::comm::control::tests::{free_port, world};

    const LONG: Duration = Duration::from_secs(60);

    /// A group whose exchanges are numbers.
    #[derive(Debug, Default)]
    struct Fake {
        begun: AtomicU32,
        ended: AtomicU32,
        faulty: AtomicBool,
        broken_off: AtomicBool,
    }

    impl Watched for Fake {
        fn name(&self) -> String {
            "the fake".into()
        }

        fn index(&self) -> usize {
            1
        }

        fn members(&self) -> &[usize] {
            &[0, 1]
        }

        fn progress(&self) -> (u32, u32) {
            (self.begun.load(Ordering::Relaxed), self.ended.load(Ordering::Relaxed))
        }

        fn fault(&self) -> Option<String> {
            self.faulty.load(Ordering::Relaxed).then(|| "it is broken".into())
        }

        fn break_off(&self) {
            self.broken_off.store(true, Ordering::Relaxed);
        }
    }

    /// One rank's part of a job, done with its group, its watchdog and its control.
    fn on_rank(rank: usize, ranks: usize, port: u16, timeout: Duration, work: impl Fn(&Fake, &Watchdog, &Control)) {
        let control = Arc::new(Control::connect(&world(rank, ranks, port), LONG).unwrap());
        let (watchdog, fake) = (Watchdog::new(rank, control.clone(), timeout).unwrap(), Arc::new(Fake::default()));
        watchdog.add(fake.clone());
        work(&fake, &watchdog, &control);
        drop(watchdog);
        // The other ranks may go on with as many exchanges as they like.
        control.leave([i32::MAX.unsigned_abs(); 3]);
    }

    /// A job of two ranks in two threads.
    fn on_two_ranks(timeout: Duration, work: impl Fn(usize, &Fake, &Watchdog, &Control) + Sync) {
        let port = free_port();
        std::thread::scope(|s| {
            for rank in 0..2 {
                let work = &work;
                s.spawn(move || {
                    on_rank(rank, 2, port, timeout, |fake, watchdog, control| {
                        work(rank, fake, watchdog, control);
                    })
                });
            }
        });
    }

    /// Waits until it is so.
    fn until(so: impl Fn() -> bool) {
        let started = Instant::now();
        while !so() {
            assert!(started.elapsed() < LONG, "it is never so");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for a failure; its text, and how long that took.
    fn failure(watchdog: &Watchdog) -> (String, Duration) {
        let started = Instant::now();
        loop {
            if let Err(error) = watchdog.check("read") {
                return (error.to_string(), started.elapsed());
            }
            assert!(started.elapsed() < LONG, "nothing fails");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn an_exchange_that_does_not_end_fails_every_rank_in_time() {
        on_two_ranks(Duration::from_secs(1), |rank, fake, watchdog, control| {
            if rank == 1 {
                fake.begun.store(5, Ordering::Relaxed);
                fake.ended.store(4, Ordering::Relaxed);
            }
            let (error, after) = failure(watchdog);
            let what = "exchange 5 of the fake has not ended within 500ms";
            assert!(error.starts_with(&format!("rank {rank}: read: ")) && error.ends_with(what), "{error}");
            assert!(after >= Duration::from_millis(400) && after < Duration::from_secs(1), "{after:?}");
            assert!(control.failure().is_some());
            until(|| fake.broken_off.load(Ordering::Relaxed));
        });
    }

    #[test]
    fn exchanges_that_end_take_as_long_as_they_like_together() {
        on_two_ranks(Duration::from_secs(2), |_, fake, watchdog, _| {
            let started = Instant::now();
            while started.elapsed() < Duration::from_millis(1500) {
                fake.begun.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(50));
                fake.ended.fetch_add(1, Ordering::Relaxed);
                watchdog.check("read").unwrap();
            }
        });
    }

    #[test]
    fn an_exchange_waits_for_a_rank_that_is_busy_and_no_longer_than_said_for_one_that_was() {
        on_two_ranks(Duration::from_secs(1), |rank, fake, watchdog, control| {
            control.set_busy(rank == 1);
            until(|| control.anyone_busy());
            fake.begun.store(u32::from(rank == 0), Ordering::Relaxed);
            let gone = Instant::now();
            while gone.elapsed() < Duration::from_millis(1500) {
                watchdog.check("read").unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
            control.set_busy(false);
            until(|| !control.anyone_busy());
            let (error, after) = failure(watchdog);
            assert!(error.ends_with("exchange 1 of the fake has not ended within 500ms"), "{error}");
            assert!(after >= Duration::from_millis(400) && after < Duration::from_secs(1), "{after:?}");
        });
    }

    /// The time-out of the job that one process of is stopped.
    #[cfg(unix)]
    const STOPPED_TIMEOUT: Duration = Duration::from_secs(2);

    /// The process that [`a_process_that_is_stopped_is_missed_even_while_it_is_busy`] stops, a rank by its environment;
    /// does nothing among the other tests.
    #[cfg(unix)]
    #[test]
    fn process_to_stop() {
        if let (Ok(rank), Ok(port)) = (std::env::var("DROPLESS_TEST_RANK"), std::env::var("DROPLESS_TEST_PORT")) {
            on_rank(rank.parse().unwrap(), 3, port.parse().unwrap(), STOPPED_TIMEOUT, |_, _, control| {
                control.set_busy(true);
                std::thread::sleep(LONG);
            });
        }
    }

    /// Ends a process, stopped or not, when it is dropped.
    #[cfg(unix)]
    struct Killed(std::process::Child);

    #[cfg(unix)]
    impl Drop for Killed {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_process_that_is_stopped_is_missed_even_while_it_is_busy() {
        for victim in [0, 1] {
            let port = free_port();
            let process = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "comm::watchdog::tests::process_to_stop"])
                .env("DROPLESS_TEST_RANK", victim.to_string())
                .env("DROPLESS_TEST_PORT", port.to_string())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let id = process.id().to_string();
            let _killed = Killed(process);
            let part = |fake: &Fake, watchdog: &Watchdog, control: &Control| {
                until(|| control.anyone_busy());
                fake.begun.store(1, Ordering::Relaxed);
                std::thread::sleep(STOPPED_TIMEOUT);
                watchdog.check("read").unwrap();
                // Both ranks do it, at about the same time.
                assert!(Command::new("kill").args(["-STOP", &id]).status().unwrap().success());
                let (error, after) = failure(watchdog);
                assert!(error.ends_with(&format!("rank {victim} has not been heard of for 1s")), "{error}");
                assert!(after < STOPPED_TIMEOUT, "{after:?}");
            };
            std::thread::scope(|s| {
                for rank in (0..3).filter(|rank| *rank != victim) {
                    s.spawn(move || on_rank(rank, 3, port, STOPPED_TIMEOUT, part));
                }
            });
        }
    }

    #[test]
    fn a_fault_of_one_rank_is_told_to_the_other() {
        on_two_ranks(LONG, |rank, fake, watchdog, _| {
            fake.faulty.store(rank == 0, Ordering::Relaxed);
            let (error, after) = failure(watchdog);
            let expected = ["rank 0: read: it is broken", "rank 1: read: rank 0 reports: it is broken"];
            assert_eq!(error, expected[rank]);
            assert!(after < Duration::from_secs(1), "{after:?}");
        });
    }

    #[test]
    fn a_rank_that_left_is_missed_only_by_who_needs_it() {
        let fake = Fake::default();
        let left = |ended| [(1, [9, ended, 9])];
        fake.begun.store(7, Ordering::Relaxed);
        assert_eq!(left_behind(&fake, 7, &left(7)), None);
        let why = left_behind(&fake, 7, &left(6)).unwrap();
        assert_eq!(why, "rank 1 left before exchange 7 of the fake");
        assert_eq!(
            left_behind(&fake, 2, &left(u32::MAX)).as_deref(),
            Some("rank 1 left before exchange 2 of the fake")
        );
        assert_eq!(left_behind(&fake, u32::MAX, &left(2)), None, "numbers begin anew");
        assert_eq!(left_behind(&fake, 7, &[(2, [0; 3])]), None, "not a member");
    }

    unsafe extern "C" {
        fn atexit(called: extern "C" fn()) -> std::ffi::c_int;
    }

    extern "C" fn sleep_long() {
        std::thread::sleep(LONG);
    }

    /// The process that [`a_process_that_does_not_react_is_ended`] starts; does nothing among the other tests.
    #[test]
    fn process_that_does_not_react() {
        if let Ok(stuck) = std::env::var("DROPLESS_TEST_STUCK") {
            if stuck == "exit" {
                // SAFETY: the function may be called at any time.
                assert_eq!(unsafe { atexit(sleep_long) }, 0);
            }
            if stuck == "full" {
                // Until nothing more fits, and for ever: the lock of the stream is held, too.
                std::thread::spawn(|| io::stderr().write_all(&vec![b'x'; 64 << 20]));
            }
            on_two_ranks(Duration::from_millis(600), |rank, fake, _, _| {
                fake.begun.store(u32::from(rank == 0), Ordering::Relaxed);
                std::thread::sleep(LONG);
            });
        }
    }

    #[test]
    fn a_process_that_does_not_react_is_ended() {
        // With code 1; by a signal, where a call on its way out does not return either.
        for (stuck, code) in [("call", Some(1)), ("exit", None)] {
            let started = Instant::now();
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "comm::watchdog::tests::process_that_does_not_react", "--nocapture"])
                .env("DROPLESS_TEST_STUCK", stuck)
                .stdin(Stdio::null())
                .output()
                .unwrap();
            assert_eq!(output.status.code(), code, "{stuck}");
            assert!(started.elapsed() < Duration::from_secs(10), "{stuck}: {:?}", started.elapsed());
            let errors = String::from_utf8_lossy(&output.stderr);
            let line = "exchange 1 of the fake has not ended within 300ms";
            assert!(errors.contains("error: rank ") && errors.contains(line), "{errors}");
        }
    }

    #[test]
    fn f05_a_process_that_does_not_react_is_ended_whoever_reads_its_errors() {
        let started = Instant::now();
        let (nobody_reads, errors) = io::pipe().unwrap();
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "comm::watchdog::tests::process_that_does_not_react", "--nocapture"])
            .env("DROPLESS_TEST_STUCK", "full")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .unwrap();
        let ended = loop {
            match process.try_wait().unwrap() {
                None if started.elapsed() < Duration::from_secs(10) => std::thread::sleep(POLL),
                ended => break ended,
            }
        };
        process.kill().unwrap();
        process.wait().unwrap();
        assert_eq!(ended.and_then(|status| status.code()), Some(1));
        drop(nobody_reads);
    }
}
