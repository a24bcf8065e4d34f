//! Ends this rank, with the reason, when the ranks cannot go on together.
//!
//! A thread looks at the connections to the other ranks and at the progress of the exchanges. An exchange that has begun
//! must end within a time; when one does not, when another rank fails or is gone, or when NCCL or a kernel reports a
//! fault, all ranks learn the reason, the exchanges under way are broken off, and what waits for them gets an error. If
//! this process then still does not react, because a driver's call does not return, it is ended.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dropless_core::{Error, Result};
use parking_lot::{Condvar, Mutex};

use super::control::{Control, Ended};

/// How often the watchdog looks.
const POLL: Duration = Duration::from_millis(20);
/// How long a process has to react to an error, at most.
const GRACE: Duration = Duration::from_secs(10);
/// How long a process that is ended has for that: on its way out it asks the driver, which may not answer there either.
const EXIT: Duration = Duration::from_secs(1);

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
    /// The longest that an exchange may take.
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
    /// Every rank of the job ends within `timeout` of the moment at which the first exchange gets stuck.
    pub(super) fn new(rank: usize, control: Arc<Control>, timeout: Duration) -> Watchdog {
        let grace = GRACE.min(timeout / 2);
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { rank, control, limit: timeout - grace, grace, state, changed });
        let watching = shared.clone();
        let thread = std::thread::Builder::new().name("watchdog".into()).spawn(move || watching.watch());
        // Without a thread there is no watch; what is stuck then stays so.
        Watchdog { shared, thread: thread.ok() }
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
            std::thread::spawn(move || group.break_off());
        }
        if !self.settled_within(self.grace) {
            eprintln!("error: {}", Error::Collective { rank: self.rank, op: "all_to_all", what: why });
            std::thread::spawn(|| {
                std::thread::sleep(EXIT);
                std::process::abort();
            });
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
        let present = pending.take_if(|pending| pending.number == begun);
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
    use std::net::{Ipv4Addr, TcpListener};
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::super::world::World;
    use super::*;

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

    /// A job of two ranks in two threads; each does its part with its group, its watchdog and its control.
    fn on_two_ranks(timeout: Duration, work: impl Fn(usize, &Fake, &Watchdog, &Control) + Sync) {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        std::thread::scope(|s| {
            for rank in 0..2 {
                let work = &work;
                let (host, job) = ("127.0.0.1".into(), "watchdog".into());
                let world = World { rank, ranks: 2, local_rank: rank, host, port, job };
                s.spawn(move || {
                    let control = Arc::new(Control::connect(&world, LONG).unwrap());
                    let (watchdog, fake) = (Watchdog::new(rank, control.clone(), timeout), Arc::new(Fake::default()));
                    watchdog.add(fake.clone());
                    work(rank, &fake, &watchdog, &control);
                    drop(watchdog);
                    // The other rank may go on with as many exchanges as it likes.
                    control.leave([i32::MAX.unsigned_abs(); 3]);
                });
            }
        });
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
            while !fake.broken_off.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
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
}
