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
        self.control.fail(&format!("rank {} reports: {why}", self.rank));
        for group in self.state.lock().groups.clone() {
            std::thread::spawn(move || group.break_off());
        }
        if !self.settled_within(self.grace) {
            eprintln!("error: {}", Error::Collective { rank: self.rank, op: "all_to_all", what: why });
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
fn left_behind(group: &dyn Watched, begun: u32, left: &std::collections::BTreeMap<usize, Ended>) -> Option<String> {
    left.iter().find_map(|(rank, ended)| {
        let ahead = begun.wrapping_sub(ended[group.index()]).cast_signed();
        let waits = group.members().contains(rank) && ahead > 0;
        waits.then(|| format!("rank {rank} left before exchange {begun} of {}", group.name()))
    })
}
