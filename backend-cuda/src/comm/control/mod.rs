//! The processes of a job talk over TCP: they meet at the start, exchange small values, and learn at once when one of
//! them fails or is gone, and soon when one is silent.
//!
//! Rank 0 listens and holds a connection to every other rank; what ranks tell each other goes through it. Every message
//! is a line of JSON. A connection that ends before its rank has said that it leaves means that its process died, and the
//! system closes the connections of a process however it ends. One that is stopped, or whose machine hangs, does not answer
//! when rank 0 asks it from time to time. Nothing here is on the way of a step.
//!
//! Who may come is in `admission`, what may be said in `message`; docs/protocol.md has both. A rank that has been taken in
//! is still not believed: what it may not say ends the job with one line.

mod admission;
mod message;
#[cfg(test)]
mod message_test;
mod proof;
#[cfg(test)]
pub(super) mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dropless_core::{Error, Result, World};
use parking_lot::{Condvar, Mutex};

use admission::GREETING;
pub(crate) use message::Ended;
use message::{Bytes, Limits, Message, line, read_line, reason};
use proof::Key;

/// How long a rank that leaves waits for the others to take notice.
const FAREWELL: Duration = Duration::from_secs(2);

/// This process's connections to the others.
#[derive(Debug)]
pub(crate) struct Control {
    rank: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    rank: usize,
    limits: Limits,
    /// Connections by rank: rank 0 has one to each other rank, those one to rank 0.
    peers: BTreeMap<usize, Mutex<TcpStream>>,
    /// Held while a message goes to several ranks: what one of them does about it must not overtake it on the way to
    /// another.
    relay: Mutex<()>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    failure: Option<String>,
    /// Ranks that have left, the first one first.
    left: Vec<(usize, Ended)>,
    /// This process has said that it leaves.
    leaving: bool,
    /// Connections that have ended.
    closed: usize,
    /// When something came last from the other end of a connection, if anything did and it has not ended.
    heard: BTreeMap<usize, Instant>,
    /// Who says that it, or at rank 0 any rank, is busy.
    busy: BTreeSet<usize>,
    /// At rank 0: what the members of unfinished exchanges brought.
    brought: HashMap<Vec<usize>, Vec<Option<Bytes>>>,
    /// The exchange that this rank takes part in.
    exchange: Option<Exchange>,
}

#[derive(Debug)]
struct Exchange {
    members: Vec<usize>,
    /// This rank among them, and what it brought.
    place: usize,
    value: Bytes,
    /// What all of them brought, when it has come.
    gathered: Option<Vec<Vec<u8>>>,
}

impl Control {
    /// Meets the other ranks.
    ///
    /// # Errors
    /// [`Error::Argument`] without a secret; [`Error::Collective`] when a rank does not come within `timeout`, when the
    /// ranks do not belong together, or when rank 0 cannot listen.
    pub(crate) fn connect(world: &World, timeout: Duration) -> Result<Control> {
        world.check_secret()?;
        let failed = |what| Error::Collective { rank: world.rank, op: "bootstrap", what };
        let Some(key) = world.secret.as_ref().map(Key::of) else { return Err(failed("no other rank".into())) };
        let deadline = Instant::now() + timeout;
        let peers = match world.rank {
            0 => admission::listen(world, &key, deadline, timeout),
            _ => admission::join(world, &key, deadline, timeout).map(|stream| BTreeMap::from([(0, stream)])),
        }
        .map_err(failed)?;
        let limits = Limits { ranks: world.ranks };
        Control::over(world.rank, limits, peers).map_err(|e| failed(format!("no thread to hear the others: {e}")))
    }

    fn over(rank: usize, limits: Limits, peers: BTreeMap<usize, TcpStream>) -> io::Result<Control> {
        let mut readers = Vec::new();
        let mut writers = BTreeMap::new();
        for (peer, stream) in peers {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(GREETING))?;
            readers.push((peer, stream.try_clone()?));
            writers.insert(peer, Mutex::new(stream));
        }
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { rank, limits, peers: writers, relay: Mutex::default(), state, changed });
        // Its end closes the connections, also when a thread is refused, and with them ends the threads that were had.
        let control = Control { rank, shared };
        for (peer, stream) in readers {
            let shared = control.shared.clone();
            std::thread::Builder::new().name(format!("control {peer}")).spawn(move || shared.follow(peer, stream))?;
        }
        Ok(control)
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Brings `value`, waits for the other `members`, and returns their values in the members' order. This rank is one
    /// of them, and all members call it in the same order.
    ///
    /// # Errors
    /// [`Error::Collective`] when a member fails, leaves, or does not bring its value within `timeout`; when `members` are
    /// not ranks in ascending order, the value is longer than values are, or an earlier exchange failed.
    pub(crate) fn gather(
        &self,
        op: &'static str,
        members: &[usize],
        value: Vec<u8>,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        let failed = |what| Error::Collective { rank: self.rank, op, what };
        if members == [self.rank] {
            return Ok(vec![value]);
        }
        let shared = &*self.shared;
        let place = members.iter().position(|&rank| rank == self.rank);
        let place = place.ok_or_else(|| failed(format!("not one of the ranks {members:?}")))?;
        shared.limits.check_members(members).and_then(|()| shared.limits.check_value(&value)).map_err(failed)?;
        let (members, value) = (members.to_vec(), Bytes(value));
        let deadline = Instant::now() + timeout;
        {
            let mut state = shared.state.lock();
            // Who brought something before it knew may still get an answer; who knows gets none.
            if let Some(why) = &state.failure {
                return Err(failed(why.clone()));
            }
            if let Some(Exchange { members, .. }) = &state.exchange {
                return Err(failed(format!("an exchange with ranks {members:?} is not over")));
            }
            state.exchange = Some(Exchange { members: members.clone(), place, value: value.clone(), gathered: None });
        }
        shared.tell(0, Message::Brings { members: members.clone(), value }).map_err(failed)?;
        let mut state = shared.state.lock();
        loop {
            if let Some(values) = state.exchange.as_mut().and_then(|exchange| exchange.gathered.take()) {
                state.exchange = None;
                return Ok(values);
            }
            if let Some(why) = &state.failure {
                return Err(failed(why.clone()));
            }
            if let Some((rank, _)) = state.left.iter().find(|(rank, _)| members.contains(rank)) {
                return Err(failed(format!("rank {rank} left")));
            }
            if shared.changed.wait_until(&mut state, deadline).timed_out() {
                return Err(failed(format!("ranks {members:?} did not all come within {timeout:?}")));
            }
        }
    }

    /// Tells every rank that nobody can go on, and what this one found. The first report counts.
    pub(crate) fn report(&self, what: impl std::fmt::Display) {
        self.shared.fail(&format!("rank {} reports: {what}", self.rank));
    }

    /// Why nobody can go on.
    pub(crate) fn failure(&self) -> Option<String> {
        self.shared.state.lock().failure.clone()
    }

    /// The ranks that have left, with what they had ended until then; the first one first.
    pub(crate) fn left(&self) -> Vec<(usize, Ended)> {
        self.shared.state.lock().left.clone()
    }

    /// From now on, as rank 0, asks the others from time to time whether they are there.
    ///
    /// # Errors
    /// The system has no thread for that.
    pub(crate) fn ask(&self, interval: Duration) -> io::Result<()> {
        if self.rank == 0 {
            let shared = self.shared.clone();
            std::thread::Builder::new().name("control".into()).spawn(move || shared.ask(interval))?;
        }
        Ok(())
    }

    /// A rank that said something before, is still connected, and has been silent for longer than `limit`.
    pub(crate) fn silent(&self, limit: Duration) -> Option<usize> {
        let state = self.shared.state.lock();
        state.heard.iter().find(|(_, heard)| heard.elapsed() > limit).map(|(rank, _)| *rank)
    }

    /// Tells every rank that this one is busy by itself, or that it is not any more.
    pub(crate) fn set_busy(&self, busy: bool) {
        self.shared.set_busy(self.rank, busy);
    }

    /// Whether any rank is busy.
    pub(crate) fn anyone_busy(&self) -> bool {
        !self.shared.state.lock().busy.is_empty()
    }

    /// Takes leave: the others may go on with what needs this rank no more. Waits, but not long, until they know.
    pub(crate) fn leave(&self, ended: Ended) {
        let shared = &*self.shared;
        if std::mem::replace(&mut shared.state.lock().leaving, true) {
            return;
        }
        {
            let _relay = shared.relay.lock();
            shared.broadcast(&Message::Left { rank: shared.rank, ended }, None);
        }
        if shared.rank != 0 {
            shared.close(Shutdown::Write);
        }
        // Rank 0 carries the others' messages until they leave, too.
        let deadline = Instant::now() + FAREWELL;
        let mut state = shared.state.lock();
        while state.closed < shared.peers.len() && !shared.changed.wait_until(&mut state, deadline).timed_out() {}
    }
}

impl Drop for Control {
    /// Without [`leave`](Control::leave) before, the others take it for a failure.
    fn drop(&mut self) {
        self.shared.close(Shutdown::Both);
    }
}

impl Shared {
    /// Ends the connections, but not in the middle of what goes to several ranks.
    fn close(&self, how: Shutdown) {
        let _relay = self.relay.lock();
        for stream in self.peers.values() {
            // A connection that is closed already needs nothing.
            let _ = stream.lock().shutdown(how);
        }
    }

    /// Sends to one rank, which may be this one.
    ///
    /// # Errors
    /// This one says what it may not.
    fn tell(&self, rank: usize, message: Message) -> std::result::Result<(), String> {
        if rank == self.rank {
            return self.hear(rank, message);
        }
        if let Some(stream) = self.peers.get(&rank) {
            send(&mut stream.lock(), &line(&message));
        }
        Ok(())
    }

    /// Sends to every connection but that of `except`. The caller holds `relay`.
    fn broadcast(&self, message: &Message, except: Option<usize>) {
        let line = line(message);
        for (_, stream) in self.peers.iter().filter(|(rank, _)| Some(**rank) != except) {
            send(&mut stream.lock(), &line);
        }
    }

    fn fail(&self, why: &str) {
        let why = reason(why);
        // Who learns it here must not close the connections before it has gone to the others.
        let _relay = self.relay.lock();
        {
            let mut state = self.state.lock();
            if state.failure.is_some() || state.leaving {
                return;
            }
            state.failure = Some(why.clone());
        }
        self.broadcast(&Message::Failed(why), None);
        self.changed.notify_all();
    }

    /// Rank 0: asks the others whether they are there, until all connections have ended. Who has not said anything since
    /// it was asked is not asked again, so that no connection fills up and holds up who writes to it.
    fn ask(&self, interval: Duration) {
        let mut asked: BTreeMap<usize, Instant> = BTreeMap::new();
        let mut state = self.state.lock();
        while state.closed < self.peers.len() {
            let answered = |rank: &usize| asked.get(rank).is_none_or(|asked| state.heard.get(rank) > Some(asked));
            let ranks: Vec<usize> = self.peers.keys().copied().filter(answered).collect();
            drop(state);
            for rank in ranks {
                asked.insert(rank, Instant::now());
                // Nobody asks itself.
                let _ = self.tell(rank, Message::Here);
            }
            let next = Instant::now() + interval;
            state = self.state.lock();
            while state.closed < self.peers.len() && !self.changed.wait_until(&mut state, next).timed_out() {}
        }
    }

    /// Notes whether a rank is busy. Rank 0 tells the others when the first one is and when none is any more.
    fn set_busy(&self, rank: usize, busy: bool) {
        let _relay = self.relay.lock();
        let mut state = self.state.lock();
        let before = !state.busy.is_empty();
        if busy {
            state.busy.insert(rank);
        } else {
            state.busy.remove(&rank);
        }
        let anyone = !state.busy.is_empty();
        drop(state);
        if self.rank == 0 && anyone != before {
            self.broadcast(&Message::Busy(anyone), None);
        } else if self.rank != 0 && self.rank == rank {
            self.broadcast(&Message::Busy(busy), None);
        }
    }

    /// Reads what `peer` says until its connection ends.
    fn follow(&self, peer: usize, stream: TcpStream) {
        let mut lines = BufReader::new(stream);
        let end = loop {
            let line = match read_line(&mut lines, self.limits.line()) {
                Ok(Some(line)) => line,
                Ok(None) => break "its process ended".to_owned(),
                Err(error) => break error.to_string(),
            };
            self.state.lock().heard.insert(peer, Instant::now());
            if let Err(what) = Message::parse(&line, self.limits).and_then(|message| self.hear(peer, message)) {
                self.fail(&format!("rank {peer} says what no rank says: {what}"));
                // Nothing more is taken from it.
                let _ = self.peers[&peer].lock().shutdown(Shutdown::Both);
                break what;
            }
        };
        let mut state = self.state.lock();
        state.closed += 1;
        state.heard.remove(&peer);
        let expected = state.leaving || state.left.iter().any(|(rank, _)| *rank == peer);
        drop(state);
        self.changed.notify_all();
        self.set_busy(peer, false);
        if !expected {
            self.fail(&format!("rank {peer} is gone ({end})"));
        } else if self.rank == 0 {
            // The answer to a rank that leaves.
            let _ = self.peers[&peer].lock().shutdown(Shutdown::Both);
        }
    }

    /// Acts on a message from `peer`; at rank 0 also passes it on.
    ///
    /// # Errors
    /// It is none that this rank may get from that one, now.
    fn hear(&self, peer: usize, message: Message) -> std::result::Result<(), String> {
        match message {
            Message::Brings { members, value } => self.collect(peer, members, value)?,
            Message::Gathered { members, values } => self.take(peer, &members, values)?,
            Message::Failed(why) => self.fail(&why),
            Message::Left { rank, ended } => self.see_off(peer, rank, ended)?,
            Message::Busy(busy) => self.set_busy(peer, busy),
            Message::Here if self.rank != 0 => self.tell(peer, Message::Here)?,
            Message::Here => {}
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Rank 0: takes a member's part of an exchange, and sends all parts to all members when it is the last one.
    fn collect(&self, peer: usize, members: Vec<usize>, value: Bytes) -> std::result::Result<(), String> {
        if self.rank != 0 {
            return Err("a part of an exchange, which is for rank 0".into());
        }
        let Ok(place) = members.binary_search(&peer) else {
            return Err(format!("a part of an exchange between ranks {members:?}"));
        };
        let mut state = self.state.lock();
        let waits = |(members, brought): (&Vec<usize>, &Vec<Option<Bytes>>)| {
            members.binary_search(&peer).is_ok_and(|place| brought[place].is_some())
        };
        if state.brought.iter().any(waits) {
            return Err("a part of an exchange before its last one is over".into());
        }
        let brought = state.brought.entry(members.clone()).or_insert_with(|| vec![None; members.len()]);
        brought[place] = Some(value);
        if brought.iter().any(Option::is_none) {
            return Ok(());
        }
        let values = state.brought.remove(&members).into_iter().flatten().flatten().collect();
        drop(state);
        let gathered = Message::Gathered { members: members.clone(), values };
        let _relay = self.relay.lock();
        members.iter().try_for_each(|&rank| self.tell(rank, gathered.clone()))
    }

    /// Takes everyone's parts of the exchange that this rank waits for.
    fn take(&self, peer: usize, members: &[usize], values: Vec<Bytes>) -> std::result::Result<(), String> {
        if peer != 0 {
            return Err("the parts of an exchange, which are for rank 0 to send".into());
        }
        let mut state = self.state.lock();
        match &mut state.exchange {
            Some(exchange) if exchange.members == members && exchange.gathered.is_none() => {
                if values.get(exchange.place) != Some(&exchange.value) || values.len() != members.len() {
                    return Err(format!("other parts of the exchange between ranks {members:?} than were brought"));
                }
                exchange.gathered = Some(values.into_iter().map(|value| value.0).collect());
                Ok(())
            }
            _ => Err(format!("the parts of an exchange between ranks {members:?}, which nobody waits for")),
        }
    }

    /// Notes that a rank has left. Rank 0 tells the others.
    fn see_off(&self, peer: usize, rank: usize, ended: Ended) -> std::result::Result<(), String> {
        let mut state = self.state.lock();
        // Rank 0 hears it of the rank itself, the others of rank 0.
        let of_itself = self.rank != 0 || rank == peer;
        if !of_itself || rank == self.rank || state.left.iter().any(|(left, _)| *left == rank) {
            return Err(format!("rank {rank} left"));
        }
        state.left.push((rank, ended));
        drop(state);
        if self.rank == 0 {
            let _relay = self.relay.lock();
            self.broadcast(&Message::Left { rank, ended }, Some(rank));
        }
        Ok(())
    }
}

/// Sends a line. A rank that cannot be written to is found to be gone by its reader; it gets no half of a line.
fn send(stream: &mut TcpStream, line: &[u8]) {
    if stream.write_all(line).is_err() {
        let _ = stream.shutdown(Shutdown::Both);
    }
}
