//! Where ranks of one process meet: each brings a value, and each leaves with everyone's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// A meeting place that is used again for every round.
#[derive(Debug)]
pub(super) struct Meeting<T> {
    /// The ranks by their places, for messages.
    members: Vec<usize>,
    timeout: Duration,
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    /// What each member brought to the round that is open, by place.
    brought: Vec<Option<T>>,
    /// Rounds that are over.
    rounds: u64,
    /// What the last round brought together. The last member that takes it clears it, so that no value outlives its
    /// round. No later round can replace it before that: it would need the member that has not taken it yet.
    gathered: Option<Arc<[T]>>,
    /// Members that took it.
    taken: usize,
    /// Why no further round can end well.
    broken: Option<String>,
}

impl<T> State<T> {
    fn take(&mut self) -> Option<Arc<[T]>> {
        self.taken += 1;
        if self.taken == self.brought.len() { self.gathered.take() } else { self.gathered.clone() }
    }

    fn break_off(&mut self, why: String) {
        self.broken.get_or_insert(why);
        self.brought.fill_with(|| None);
    }
}

impl<T> Meeting<T> {
    /// A meeting place for these ranks, none of which waits longer than `timeout`.
    pub(super) fn new(members: Vec<usize>, timeout: Duration) -> Self {
        let brought = members.iter().map(|_| None).collect();
        let state = State { brought, rounds: 0, gathered: None, taken: 0, broken: None };
        Meeting { members, timeout, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Brings the value of the member at `place`, waits for all members, and returns their values by place.
    ///
    /// # Errors
    /// Why the round failed: a rank left or did not arrive in time. Every rank gets the same words, and so does every
    /// later call.
    pub(super) fn gather(&self, place: usize, value: T) -> Result<Arc<[T]>, String> {
        let mut state = self.state.lock();
        if state.broken.is_none() && state.brought[place].replace(value).is_some() {
            state.break_off(format!("rank {} was entered by two threads at once", self.members[place]));
            self.changed.notify_all();
        }
        let round = state.rounds;
        if state.broken.is_none() && state.brought.iter().all(Option::is_some) {
            state.gathered = Some(state.brought.iter_mut().filter_map(Option::take).collect());
            state.taken = 0;
            state.rounds += 1;
            self.changed.notify_all();
        }
        let deadline = Instant::now() + self.timeout;
        while state.rounds == round {
            if let Some(why) = &state.broken {
                return Err(why.clone());
            }
            if self.changed.wait_until(&mut state, deadline).timed_out() && state.rounds == round {
                let missing = self.members.iter().zip(&state.brought).filter(|(_, brought)| brought.is_none());
                let why =
                    format!("rank {} did not arrive within {:?}", list(missing.map(|(rank, _)| rank)), self.timeout);
                state.break_off(why);
                self.changed.notify_all();
            }
        }
        state.take().ok_or_else(|| "the round's values were taken twice".into())
    }

    /// The member at `place` will not come again: present and later rounds fail.
    pub(super) fn leave(&self, place: usize) {
        self.state.lock().break_off(format!("rank {} left", self.members[place]));
        self.changed.notify_all();
    }
}

fn list<'a>(ranks: impl Iterator<Item = &'a usize>) -> String {
    ranks.map(usize::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn values_come_by_rank_in_every_round() {
        let meeting = Meeting::new(vec![0, 1, 2], LONG);
        std::thread::scope(|s| {
            for rank in 0..3 {
                let meeting = &meeting;
                s.spawn(move || {
                    for round in 0..1000 {
                        let all = meeting.gather(rank, (round, rank)).unwrap();
                        assert_eq!(*all, [(round, 0), (round, 1), (round, 2)]);
                    }
                });
            }
        });
    }

    #[test]
    fn values_do_not_outlive_their_round() {
        let meeting = Meeting::new(vec![0], LONG);
        let value = Arc::new(());
        drop(meeting.gather(0, value.clone()).unwrap());
        assert_eq!(Arc::strong_count(&value), 1);
    }

    #[test]
    fn a_rank_that_does_not_arrive_is_named_to_all_others() {
        let meeting = Meeting::new(vec![0, 2, 4], Duration::from_millis(20));
        let why = std::thread::scope(|s| {
            let waiting = s.spawn(|| meeting.gather(0, ()).unwrap_err());
            [meeting.gather(2, ()).unwrap_err(), waiting.join().unwrap()]
        });
        assert!(why[0].contains("rank 2 did not arrive within 20ms"), "{why:?}");
        assert_eq!(why[0], why[1]);
        assert_eq!(meeting.gather(1, ()).unwrap_err(), why[0], "a meeting that broke off stays broken");
    }

    #[test]
    fn a_rank_that_leaves_wakes_the_waiting() {
        let meeting = Meeting::new(vec![1, 3], LONG);
        let started = Instant::now();
        let why = std::thread::scope(|s| {
            let waiting = s.spawn(|| meeting.gather(0, ()).unwrap_err());
            meeting.leave(1);
            waiting.join().unwrap()
        });
        assert_eq!(why, "rank 3 left");
        assert!(started.elapsed() < LONG / 2);
    }
}
