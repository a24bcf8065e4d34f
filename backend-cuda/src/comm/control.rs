//! The processes of a job talk over TCP: they meet at the start, exchange small values, and learn at once when one of
//! them fails or is gone, and soon when one is silent.
//!
//! Rank 0 listens and holds a connection to every other rank; what ranks tell each other goes through it. Every message
//! is a line of JSON. A connection that ends before its rank has said that it leaves means that its process died, and the
//! system closes the connections of a process however it ends. One that is stopped, or whose machine hangs, does not answer
//! when rank 0 asks it from time to time. Nothing here is on the way of a step.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use dropless_core::{Error, Result};
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use super::world::World;

/// What must be equal in all ranks, besides the job.
const VERSION: &str = concat!("dropless ", env!("CARGO_PKG_VERSION"));
/// How long a connection may take to say what it is.
const GREETING: Duration = Duration::from_secs(5);
/// How long a rank that leaves waits for the others to take notice.
const FAREWELL: Duration = Duration::from_secs(2);
/// How often a rank that is not there yet is looked for.
const RETRY: Duration = Duration::from_millis(20);
/// The longest message, in bytes.
const LONGEST: u64 = 1 << 24;

/// Exchanges that a rank has ended in the groups World, Experts and Replicas; modulo 2^32.
pub(crate) type Ended = [u32; 3];

/// What the ranks' first meeting comes to, or why it fails.
type Met<T> = std::result::Result<T, String>;

/// The first words of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Hello {
    version: String,
    job: String,
    ranks: usize,
    rank: usize,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Welcome,
    /// Rank 0 belongs to another job, which may be about to end.
    OtherJob,
    /// The ranks do not belong together.
    Failed(String),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Message {
    /// A rank's part of an exchange of values between `members`.
    Brings { members: Vec<usize>, value: Vec<u8> },
    /// Everyone's part.
    Gathered { members: Vec<usize>, values: Vec<Vec<u8>> },
    /// Nobody can go on.
    Failed(String),
    /// A rank has ended all its exchanges and will take part in none any more.
    Left { rank: usize, ended: Ended },
    /// The sender does something long by itself, or is back. Of rank 0: any rank does, or none.
    Busy(bool),
    /// Rank 0 asks whether a rank is there, and so shows that it is; the rank says the same.
    Here,
}

/// This process's connections to the others.
#[derive(Debug)]
pub(crate) struct Control {
    rank: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    rank: usize,
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
    brought: HashMap<Vec<usize>, Vec<Option<Vec<u8>>>>,
    /// The exchange that this rank waits for, when it is complete.
    gathered: HashMap<Vec<usize>, Vec<Vec<u8>>>,
}

impl Control {
    /// Meets the other ranks.
    ///
    /// # Errors
    /// [`Error::Collective`] when one does not come within `timeout`, when the ranks do not belong together, or when the
    /// port is in use.
    pub(crate) fn connect(world: &World, timeout: Duration) -> Result<Control> {
        let failed = |what| Error::Collective { rank: world.rank, op: "bootstrap", what };
        let deadline = Instant::now() + timeout;
        let peers = match world.rank {
            0 => listen(world, deadline, timeout),
            _ => join(world, deadline, timeout).map(|stream| BTreeMap::from([(0, stream)])),
        }
        .map_err(failed)?;
        Control::over(world.rank, peers).map_err(|e| failed(e.to_string()))
    }

    fn over(rank: usize, peers: BTreeMap<usize, TcpStream>) -> io::Result<Control> {
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
        let shared = Arc::new(Shared { rank, peers: writers, relay: Mutex::default(), state, changed });
        for (peer, stream) in readers {
            let shared = shared.clone();
            std::thread::Builder::new().name(format!("control {peer}")).spawn(move || shared.follow(peer, stream))?;
        }
        Ok(Control { rank, shared })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Brings `value`, waits for the other `members`, and returns their values in the members' order. This rank is one
    /// of them, and all members call it in the same order.
    ///
    /// # Errors
    /// [`Error::Collective`] when a member fails, leaves, or does not bring its value within `timeout`.
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
        // Who brought something before it knew may still get an answer; who knows gets none.
        if let Some(why) = self.failure() {
            return Err(failed(why));
        }
        let deadline = Instant::now() + timeout;
        self.shared.tell(0, Message::Brings { members: members.to_vec(), value });
        let mut state = self.shared.state.lock();
        loop {
            if let Some(values) = state.gathered.remove(members) {
                return Ok(values);
            }
            if let Some(why) = &state.failure {
                return Err(failed(why.clone()));
            }
            if let Some((rank, _)) = state.left.iter().find(|(rank, _)| members.contains(rank)) {
                return Err(failed(format!("rank {rank} left")));
            }
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                return Err(failed(format!("ranks {members:?} did not all come within {timeout:?}")));
            }
        }
    }

    /// Tells every rank that nobody can go on, and what this one found. The first report counts.
    pub(crate) fn report(&self, what: impl std::fmt::Display) {
        self.shared.fail(format!("rank {} reports: {what}", self.rank));
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
    fn tell(&self, rank: usize, message: Message) {
        if rank == self.rank {
            self.hear(rank, message);
        } else if let Some(stream) = self.peers.get(&rank) {
            // A rank that cannot be written to is found to be gone by its reader.
            let _ = send(&mut stream.lock(), &message);
        }
    }

    /// Sends to every connection but that of `except`. The caller holds `relay`.
    fn broadcast(&self, message: &Message, except: Option<usize>) {
        for (_, stream) in self.peers.iter().filter(|(rank, _)| Some(**rank) != except) {
            let _ = send(&mut stream.lock(), message);
        }
    }

    fn fail(&self, why: String) {
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
                self.tell(rank, Message::Here);
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
            match receive(&mut lines) {
                Ok(Some(message)) => {
                    self.state.lock().heard.insert(peer, Instant::now());
                    self.hear(peer, message);
                }
                Ok(None) => break "its process ended".to_owned(),
                Err(error) => break error.to_string(),
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
            self.fail(format!("rank {peer} is gone ({end})"));
        } else if self.rank == 0 {
            // The answer to a rank that leaves.
            let _ = self.peers[&peer].lock().shutdown(Shutdown::Both);
        }
    }

    /// Acts on a message from `peer`; at rank 0 also passes it on.
    fn hear(&self, peer: usize, message: Message) {
        let mut state = self.state.lock();
        match message {
            Message::Brings { members, value } => {
                let Some(place) = members.iter().position(|&rank| rank == peer) else { return };
                let brought = state.brought.entry(members.clone()).or_insert_with(|| vec![None; members.len()]);
                brought[place] = Some(value);
                if brought.iter().all(Option::is_some) {
                    let values = state.brought.remove(&members).into_iter().flatten().flatten().collect();
                    drop(state);
                    let gathered = Message::Gathered { members: members.clone(), values };
                    let _relay = self.relay.lock();
                    members.iter().for_each(|&rank| self.tell(rank, gathered.clone()));
                }
            }
            Message::Gathered { members, values } => {
                state.gathered.insert(members, values);
            }
            Message::Failed(why) => {
                drop(state);
                self.fail(why);
            }
            Message::Left { rank, ended } => {
                state.left.push((rank, ended));
                drop(state);
                if self.rank == 0 {
                    let _relay = self.relay.lock();
                    self.broadcast(&Message::Left { rank, ended }, Some(rank));
                }
            }
            Message::Busy(busy) => {
                drop(state);
                self.set_busy(peer, busy);
            }
            Message::Here => {
                drop(state);
                if self.rank != 0 {
                    self.tell(peer, Message::Here);
                }
            }
        }
        self.changed.notify_all();
    }
}

fn send(stream: &mut TcpStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// The next message; None at the end of the connection.
fn receive<T: for<'a> Deserialize<'a>>(lines: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    let bytes = lines.take(LONGEST).read_until(b'\n', &mut line)?;
    if bytes == 0 { Ok(None) } else { Ok(Some(serde_json::from_slice(&line)?)) }
}

/// The first message of a connection. Reads no byte past it, which would be lost to the reader that comes after.
fn first<T: for<'a> Deserialize<'a>>(stream: &TcpStream) -> io::Result<Option<T>> {
    stream.set_read_timeout(Some(GREETING))?;
    stream.set_write_timeout(Some(GREETING))?;
    receive(&mut BufReader::with_capacity(1, stream))
}

/// Rank 0: waits until every other rank has come. Gives the port back at the end.
fn listen(world: &World, deadline: Instant, timeout: Duration) -> Met<BTreeMap<usize, TcpStream>> {
    let listener = bind(world)?;
    let (arrived, arrivals) = channel();
    let mut peers = BTreeMap::new();
    while peers.len() + 1 < world.ranks {
        if let Ok((stream, _)) = listener.accept() {
            // One that stays silent must not hold up the others.
            let arrived = arrived.clone();
            std::thread::spawn(move || {
                if stream.set_nonblocking(false).is_ok()
                    && let Ok(Some(hello)) = first::<Hello>(&stream)
                {
                    // Nobody waits for a connection that comes too late.
                    let _ = arrived.send((stream, hello));
                }
            });
        }
        if let Ok((stream, hello)) = arrivals.recv_timeout(RETRY) {
            admit(world, &mut peers, stream, &hello)?;
        } else if Instant::now() >= deadline {
            let absent = (1..world.ranks).filter(|rank| !peers.contains_key(rank)).map(|rank| rank.to_string());
            let absent = absent.collect::<Vec<_>>().join(", ");
            return Err(format!("rank {absent} did not come to {}:{} within {timeout:?}", world.host, world.port));
        }
    }
    Ok(peers)
}

/// Rank 0: takes a rank in. One that contradicts the others fails them, too; one of another job is only sent away.
fn admit(world: &World, peers: &mut BTreeMap<usize, TcpStream>, mut stream: TcpStream, hello: &Hello) -> Met<()> {
    let rank = hello.rank;
    // What cannot be answered has ended, and is found to be gone by its reader.
    if hello.job != world.job {
        let _ = send(&mut stream, &Answer::OtherJob);
        return Ok(());
    }
    let refusal = if hello.version != VERSION {
        format!("rank {rank} runs {}, but rank 0 {VERSION}", hello.version)
    } else if hello.ranks != world.ranks {
        format!("rank {rank} is one of {} ranks, but rank 0 one of {}", hello.ranks, world.ranks)
    } else if rank == 0 || rank >= world.ranks || peers.contains_key(&rank) {
        format!("two processes say that they are rank {rank} (two jobs at port {}?)", world.port)
    } else {
        let _ = send(&mut stream, &Answer::Welcome);
        peers.insert(rank, stream);
        return Ok(());
    };
    let _ = send(&mut stream, &Answer::Failed(refusal.clone()));
    for stream in peers.values_mut() {
        let _ = send(stream, &Message::Failed(refusal.clone()));
    }
    Err(refusal)
}

/// Listens on every address of the machine, unless rank 0's is one that only this machine has. (A machine's name may
/// mean such an address on the machine itself, and another elsewhere.)
fn bind(world: &World) -> Met<TcpListener> {
    let local = world.host == "localhost" || world.host.parse().is_ok_and(|address: IpAddr| address.is_loopback());
    let choices: [IpAddr; 2] = if local {
        [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
    } else {
        [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()]
    };
    let listen = |address: IpAddr| {
        let listener = TcpListener::bind((address, world.port))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    let port = world.port;
    listen(choices[0])
        .or_else(|error: io::Error| match error.kind() {
            io::ErrorKind::AddrInUse => Err(error),
            // This machine may know only one of the two versions of the protocol.
            _ => listen(choices[1]),
        })
        .map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => format!("port {port} is in use (another job? set MASTER_PORT)"),
            _ => format!("port {port}: {error}"),
        })
}

/// Any other rank: finds rank 0, which may start later.
fn join(world: &World, deadline: Instant, timeout: Duration) -> Met<TcpStream> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let why = match call(world, left.clamp(RETRY, GREETING)) {
            Ok((stream, Answer::Welcome)) => return Ok(stream),
            Ok((_, Answer::Failed(why))) => return Err(why),
            // It may be about to end.
            Ok((_, Answer::OtherJob)) => "another job is there".into(),
            Err(error) => error.to_string(),
        };
        if left.is_zero() {
            return Err(format!("rank 0 was not found at {}:{} within {timeout:?}: {why}", world.host, world.port));
        }
        std::thread::sleep(RETRY);
    }
}

/// Greets what listens at rank 0's address.
fn call(world: &World, timeout: Duration) -> io::Result<(TcpStream, Answer)> {
    let mut connection = Err(io::Error::other("the name has no address"));
    for address in (&*world.host, world.port).to_socket_addrs()? {
        connection = TcpStream::connect_timeout(&address, timeout);
        if connection.is_ok() {
            break;
        }
    }
    let mut stream = connection?;
    let World { rank, ranks, job, .. } = world.clone();
    send(&mut stream, &Hello { version: VERSION.into(), job, ranks, rank })?;
    match first(&stream) {
        Ok(Some(answer)) => Ok((stream, answer)),
        Ok(None) => Err(io::Error::other("it closes the connection")),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(io::Error::other("it speaks another language")),
        Err(_) => Err(io::Error::other("it does not answer")),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(300);

    /// A port of this machine at which nobody listens.
    pub(crate) fn free_port() -> u16 {
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
    }

    fn world(rank: usize, ranks: usize, port: u16) -> World {
        World { rank, ranks, local_rank: rank, host: "127.0.0.1".into(), port, job: "test".into() }
    }

    /// Each rank's part, in threads; the ranks start in descending order.
    fn on_ranks<R: Send>(ranks: usize, work: impl Fn(Control) -> R + Sync) -> Vec<R> {
        let port = free_port();
        std::thread::scope(|s| {
            let work = &work;
            let start = |rank| s.spawn(move || work(Control::connect(&world(rank, ranks, port), LONG).unwrap()));
            let mut threads: Vec<_> = (0..ranks).rev().map(start).collect();
            threads.reverse();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn gather(control: &Control, members: &[usize], value: u8) -> Result<Vec<Vec<u8>>> {
        control.gather("test", members, vec![value], LONG)
    }

    /// Waits until there is a failure; how long that took.
    fn noticed(control: &Control) -> (String, Duration) {
        let started = Instant::now();
        loop {
            if let Some(why) = control.failure() {
                return (why, started.elapsed());
            }
            assert!(started.elapsed() < LONG, "nothing was noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn values_come_in_the_order_of_the_members() {
        on_ranks(4, |control| {
            let rank = u8::try_from(control.rank).unwrap();
            for round in 0..50 {
                let all = gather(&control, &[0, 1, 2, 3], rank + round).unwrap();
                assert_eq!(all, [[round], [round + 1], [round + 2], [round + 3]]);
                // Two groups at once, one of them without rank 0.
                let (members, other) = if rank % 2 == 0 { ([0, 2], [rank ^ 2]) } else { ([1, 3], [rank ^ 2]) };
                let pair = gather(&control, &members, rank).unwrap();
                assert!(pair.contains(&vec![rank]) && pair.contains(&other.to_vec()), "{pair:?}");
                assert_eq!(gather(&control, &[control.rank], 9).unwrap(), [[9]]);
            }
            control.leave([0; 3]);
        });
    }

    #[test]
    fn leaving_is_no_failure() {
        let started = Instant::now();
        on_ranks(3, |control| {
            gather(&control, &[0, 1, 2], 0).unwrap();
            if control.rank == 1 {
                control.leave([1, 2, 3]);
                return;
            }
            while control.left().is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(control.left(), [(1, [1, 2, 3])]);
            // The others go on, but not with the one that left.
            gather(&control, &[0, 2], 0).unwrap();
            let error = gather(&control, &[0, 1, 2], 0).unwrap_err().to_string();
            assert_eq!(error, format!("rank {}: test: rank 1 left", control.rank));
            assert_eq!(control.failure(), None);
            control.leave([0; 3]);
        });
        assert!(started.elapsed() < FAREWELL, "leaving waits for a time-out: {:?}", started.elapsed());
    }

    #[test]
    fn everyone_knows_whether_anyone_is_busy() {
        on_ranks(3, |control| {
            let meet = || gather(&control, &[0, 1, 2], 0).unwrap();
            for busy in [0, 0b001, 0b010, 0b110, 0b100, 0b011, 0b111, 0] {
                control.set_busy(busy >> control.rank & 1 == 1);
                meet();
                assert_eq!(control.anyone_busy(), busy != 0, "rank {}, {busy:03b}", control.rank);
                meet();
            }
            if control.rank == 2 {
                control.set_busy(true);
            }
            meet();
            // Who has left is not waited for.
            let started = Instant::now();
            while control.rank != 2 && control.anyone_busy() {
                assert!(started.elapsed() < FAREWELL, "rank {}", control.rank);
                std::thread::sleep(Duration::from_millis(1));
            }
            control.leave([0; 3]);
        });
    }

    #[test]
    fn who_answers_and_who_has_left_is_not_silent() {
        let limit = Duration::from_secs(1);
        on_ranks(3, |control| {
            control.ask(limit / 10).unwrap();
            gather(&control, &[0, 1, 2], 0).unwrap();
            if control.rank == 1 {
                control.leave([0; 3]);
                return;
            }
            let started = Instant::now();
            while started.elapsed() < 2 * limit {
                assert_eq!(control.silent(limit), None, "rank {}", control.rank);
                std::thread::sleep(Duration::from_millis(1));
            }
            control.leave([0; 3]);
        });
    }

    #[test]
    fn a_failure_reaches_everyone_with_its_reason() {
        for origin in 0..3 {
            on_ranks(3, |control| {
                if control.rank == origin {
                    control.report("the card is on fire");
                }
                let reason = format!("rank {origin} reports: the card is on fire");
                assert_eq!(noticed(&control).0, reason);
                let error = gather(&control, &[0, 1, 2], 0).unwrap_err().to_string();
                assert_eq!(error, format!("rank {}: test: {reason}", control.rank));
            });
        }
    }

    #[test]
    fn a_rank_that_brings_nothing_is_waited_for_no_longer_than_said() {
        on_ranks(2, |control| match control.rank {
            0 => {
                let error = control.gather("test", &[0, 1], vec![], SHORT).unwrap_err().to_string();
                assert_eq!(error, "rank 0: test: ranks [0, 1] did not all come within 300ms");
                control.leave([0; 3]);
            }
            _ => while control.left().is_empty() {},
        });
    }

    /// The process that [`a_killed_process_is_noticed_at_once`] kills: rank 1 or 0 by its environment. Does nothing
    /// among the other tests.
    #[test]
    fn process_to_kill() {
        let Ok(Some(world)) = World::from_environment() else { return };
        let control = Control::connect(&world, LONG).unwrap();
        gather(&control, &[0, 1], 0).unwrap();
        std::thread::sleep(LONG);
    }

    #[test]
    fn a_killed_process_is_noticed_at_once() {
        for victim in [0, 1] {
            let port = free_port();
            let mut process = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "comm::control::tests::process_to_kill"])
                .envs([("RANK", victim.to_string()), ("WORLD_SIZE", "2".into()), ("LOCAL_RANK", "0".into())])
                .envs([("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", port.to_string())])
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let me = World { job: String::new(), ..world(1 - victim, 2, port) };
            let control = Control::connect(&me, LONG).unwrap();
            gather(&control, &[0, 1], 0).unwrap();
            process.kill().unwrap();
            process.wait().unwrap();
            let (why, after) = noticed(&control);
            assert!(why.starts_with(&format!("rank {victim} is gone")), "{why}");
            assert!(after < Duration::from_secs(1), "{after:?}");
        }
    }

    /// The errors of two ranks that do not get together.
    fn refused(zero: World, other: World) -> [String; 2] {
        let other = std::thread::spawn(move || Control::connect(&other, LONG).unwrap_err().to_string());
        let zero = Control::connect(&zero, LONG).unwrap_err().to_string();
        [zero, other.join().unwrap()]
    }

    #[test]
    fn ranks_that_contradict_each_other_fail_all() {
        let port = free_port();
        let errors = refused(world(0, 3, port), world(1, 2, port));
        assert_eq!(errors[0], "rank 0: bootstrap: rank 1 is one of 2 ranks, but rank 0 one of 3");
        assert_eq!(errors[1], "rank 1: bootstrap: rank 1 is one of 2 ranks, but rank 0 one of 3");
        // The first rank 1 is taken in, the second refused; all three end.
        let port = free_port();
        let twins: Vec<_> = (0..2)
            .map(|_| {
                std::thread::spawn(move || match Control::connect(&world(1, 3, port), LONG) {
                    Ok(control) => noticed(&control).0,
                    Err(error) => error.to_string(),
                })
            })
            .collect();
        let what = format!("two processes say that they are rank 1 (two jobs at port {port}?)");
        let zero = Control::connect(&world(0, 3, port), LONG).unwrap_err().to_string();
        assert_eq!(zero, format!("rank 0: bootstrap: {what}"));
        for twin in twins {
            assert!(twin.join().unwrap().ends_with(&what));
        }
    }

    #[test]
    fn a_rank_of_another_job_is_sent_away_and_fails_nobody() {
        let port = free_port();
        let stale = World { job: "before".into(), ..world(1, 2, port) };
        let stale = std::thread::spawn(move || Control::connect(&stale, SHORT).unwrap_err().to_string());
        let zero = std::thread::spawn(move || Control::connect(&world(0, 2, port), LONG).map(|_| ()));
        let stale = stale.join().unwrap();
        assert!(stale.ends_with("within 300ms: another job is there"), "{stale}");
        Control::connect(&world(1, 2, port), LONG).unwrap();
        zero.join().unwrap().unwrap();
    }

    #[test]
    fn strangers_at_the_port_hold_up_nobody() {
        let port = free_port();
        let zero = std::thread::spawn(move || Control::connect(&world(0, 2, port), LONG).map(|_| ()));
        let connect = || loop {
            if let Ok(stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                return stream;
            }
        };
        let _silent = connect();
        connect().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let started = Instant::now();
        Control::connect(&world(1, 2, port), LONG).unwrap();
        zero.join().unwrap().unwrap();
        assert!(started.elapsed() < GREETING, "{:?}", started.elapsed());
    }

    #[test]
    fn what_is_not_there_is_named() {
        let port = free_port();
        let error = Control::connect(&world(0, 4, port), SHORT).unwrap_err().to_string();
        assert_eq!(error, format!("rank 0: bootstrap: rank 1, 2, 3 did not come to 127.0.0.1:{port} within 300ms"));
        let error = Control::connect(&world(1, 2, port), SHORT).unwrap_err().to_string();
        assert!(error.starts_with(&format!("rank 1: bootstrap: rank 0 was not found at 127.0.0.1:{port}")), "{error}");
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        let error = Control::connect(&world(0, 2, port), SHORT).unwrap_err().to_string();
        assert_eq!(error, format!("rank 0: bootstrap: port {port} is in use (another job? set MASTER_PORT)"));
        drop(other);
    }
}
