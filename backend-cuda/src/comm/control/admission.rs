//! How the ranks of a job come together. Rank 0 listens where `MASTER_ADDR` is; every other rank connects, and both prove
//! that they know the job's secret before either believes a word (docs/protocol.md).
//!
//! Anybody may connect. Until somebody has proven to belong to the job, it gets no thread, no more memory than two short
//! lines, and no more time than [`GREETING`]; when there are too many, the oldest go first.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use dropless_core::World;
use dropless_core::escape::escaped;

use super::message::{Bytes, FIRST_LINE, Hello, Message, PROTOCOL, Proof, Reply, Verdict, line};
use super::proof::{Key, Side, nonce};

/// What must be equal in all ranks, besides the job.
const VERSION: &str = concat!("dropless ", env!("CARGO_PKG_VERSION"));
/// How long a connection may take, in all, until it has proven to belong to the job; and how long a line that is written
/// may find no room.
pub(super) const GREETING: Duration = Duration::from_secs(5);
/// How often a rank that is not there yet is looked for, and one that was sent away looks again.
const RETRY: Duration = Duration::from_millis(20);
const RETRY_DENIED: Duration = Duration::from_millis(200);
/// How often a connection is looked at that says nothing.
const POLL: Duration = Duration::from_millis(1);
/// Connections that have proven nothing, besides one for each rank.
const STRANGERS: usize = 64;

/// What the ranks' first meeting comes to, or why it fails.
pub(super) type Met<T> = Result<T, String>;

/// A connection that has proven nothing.
struct Candidate {
    stream: TcpStream,
    since: Instant,
    /// What has come of its next line.
    line: Vec<u8>,
    stage: Stage,
}

enum Stage {
    Hello,
    /// It was asked for a proof.
    Challenged(Asked),
}

/// A rank that was asked for a proof, and what was said.
struct Asked {
    hello: Hello,
    said: [Vec<u8>; 2],
}

/// What becomes of a candidate.
enum Next {
    Waits,
    Gone,
    /// It did not prove anything, and was told so.
    Denied,
    Proven(Asked),
}

impl Candidate {
    fn new(stream: TcpStream) -> io::Result<Candidate> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Candidate { stream, since: Instant::now(), line: Vec::new(), stage: Stage::Hello })
    }

    /// Takes what it has said since.
    fn look(&mut self, key: &Key) -> Next {
        if self.since.elapsed() > GREETING {
            return Next::Gone;
        }
        let mut bytes = [0; FIRST_LINE];
        match self.stream.read(&mut bytes[self.line.len()..]) {
            Ok(0) => return Next::Gone,
            Ok(read) => self.line.extend_from_slice(&bytes[self.line.len()..][..read]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Next::Waits,
            Err(_) => return Next::Gone,
        }
        let Some(end) = self.line.iter().position(|&byte| byte == b'\n') else {
            return if self.line.len() < FIRST_LINE { Next::Waits } else { Next::Gone };
        };
        // Nobody speaks twice without an answer.
        if end + 1 != self.line.len() {
            return Next::Gone;
        }
        self.line.truncate(end);
        let line = std::mem::take(&mut self.line);
        match std::mem::replace(&mut self.stage, Stage::Hello) {
            Stage::Hello => self.challenge(line),
            Stage::Challenged(asked) => self.judge(key, asked, &line),
        }
    }

    fn challenge(&mut self, said: Vec<u8>) -> Next {
        let hello = match Hello::parse(&said) {
            Ok(hello) => hello,
            Err(what) => return self.deny(what),
        };
        // Without a nonce nobody can prove anything.
        let Ok(nonce) = nonce() else { return Next::Gone };
        let challenge = line(&Reply::Challenge { nonce });
        if self.stream.write_all(&challenge).is_err() {
            return Next::Gone;
        }
        let asked = challenge[..challenge.len() - 1].to_vec();
        self.stage = Stage::Challenged(Asked { hello, said: [said, asked] });
        Next::Waits
    }

    fn judge(&mut self, key: &Key, asked: Asked, line: &[u8]) -> Next {
        let said = asked.said.each_ref().map(Vec::as_slice);
        match Proof::parse(line) {
            Ok(Proof { proof }) if key.proves(&proof, Side::Joins, &said) => Next::Proven(asked),
            Ok(_) => self.deny("this process does not have the job's secret".into()),
            Err(what) => self.deny(what),
        }
    }

    fn deny(&mut self, why: String) -> Next {
        // Who does not take it learns it from the end of the connection.
        let _ = self.stream.write_all(&line(&Reply::Denied(why)));
        Next::Denied
    }
}

/// Rank 0: waits until every other rank has come. Gives the port back at the end.
pub(super) fn listen(
    world: &World,
    key: &Key,
    deadline: Instant,
    timeout: Duration,
) -> Met<BTreeMap<usize, TcpStream>> {
    let listeners = bind(world)?;
    let mut peers = BTreeMap::new();
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut denied = 0_u64;
    while peers.len() + 1 < world.ranks {
        for listener in &listeners {
            // As many as there may be, so that who comes fast holds up nobody.
            for _ in 0..STRANGERS {
                let Ok((stream, _)) = listener.accept() else { break };
                candidates.extend(Candidate::new(stream));
            }
        }
        let surplus = candidates.len().saturating_sub(world.ranks + STRANGERS);
        candidates.drain(..surplus);
        for mut candidate in std::mem::take(&mut candidates) {
            match candidate.look(key) {
                Next::Waits => candidates.push(candidate),
                Next::Gone => {}
                Next::Denied => denied += 1,
                Next::Proven(asked) => admit(world, key, &mut peers, candidate.stream, &asked)?,
            }
        }
        if Instant::now() >= deadline {
            let absent = (1..world.ranks).filter(|rank| !peers.contains_key(rank)).map(|rank| rank.to_string());
            let absent = absent.collect::<Vec<_>>().join(", ");
            let hint = match denied {
                0 => String::new(),
                _ => "; somebody came without the job's secret (is DROPLESS_SECRET the same for all ranks?)".into(),
            };
            return Err(format!(
                "rank {absent} did not come to {}:{} within {timeout:?}{hint}",
                world.host, world.port
            ));
        }
        std::thread::sleep(if candidates.is_empty() { RETRY } else { POLL });
    }
    Ok(peers)
}

/// Rank 0: takes a rank in that has proven to know the secret. One that contradicts the others fails them, too; one of
/// another job is only sent away.
fn admit(
    world: &World,
    key: &Key,
    peers: &mut BTreeMap<usize, TcpStream>,
    mut stream: TcpStream,
    Asked { hello, said: [said, asked] }: &Asked,
) -> Met<()> {
    let (rank, port) = (hello.rank, world.port);
    let verdict = if hello.job != job(world) {
        Verdict::OtherJob
    } else if hello.version != VERSION {
        Verdict::Refused(format!("rank {rank} runs {}, but rank 0 {VERSION}", escaped(&shortened(&hello.version))))
    } else if hello.ranks != world.ranks {
        Verdict::Refused(format!("rank {rank} is one of {} ranks, but rank 0 one of {}", hello.ranks, world.ranks))
    } else if rank == 0 || rank >= world.ranks || peers.contains_key(&rank) {
        Verdict::Refused(format!("two processes say that they are rank {rank} (two jobs at port {port}?)"))
    } else {
        Verdict::Welcome
    };
    let proof = key.proof(Side::Listens, &[said, asked, &line(&verdict)]);
    let answered = stream.write_all(&line(&Reply::Answer { verdict: verdict.clone(), proof }));
    match verdict {
        Verdict::Welcome => {
            let prepared = answered.and_then(|()| stream.set_nonblocking(false));
            // One that is gone already comes again.
            if prepared.and_then(|()| stream.set_write_timeout(Some(GREETING))).is_ok() {
                peers.insert(rank, stream);
            }
            Ok(())
        }
        Verdict::OtherJob => Ok(()),
        Verdict::Refused(why) => {
            for stream in peers.values_mut() {
                let _ = stream.write_all(&line(&Message::Failed(why.clone())));
            }
            Err(why)
        }
    }
}

/// What tells jobs with one secret apart.
fn job(world: &World) -> Bytes {
    Bytes(blake3::hash(world.job.as_bytes()).as_bytes().to_vec())
}

/// Listens at the addresses of this machine that `MASTER_ADDR` means, and at no other.
fn bind(world: &World) -> Met<Vec<TcpListener>> {
    let (host, port) = (&*world.host, world.port);
    let addresses: Vec<SocketAddr> = match world.listen {
        Some(address) => vec![(address, port).into()],
        None => addresses(host, port).map_err(|error| format!("MASTER_ADDR {}: {error}", escaped(host)))?,
    };
    // A machine's name may mean such an address on the machine itself, and another one elsewhere.
    let named = host != "localhost" && host.parse::<IpAddr>().is_err();
    if world.listen.is_none() && named && !world.one_machine && addresses.iter().all(|a| a.ip().is_loopback()) {
        return Err(format!(
            "MASTER_ADDR {} is {} here, where no other machine can come: give the address itself, or in DROPLESS_LISTEN \
             the one at which rank 0 listens",
            escaped(host),
            addresses.first().map_or("nothing".into(), |address| address.ip().to_string()),
        ));
    }
    let mut listeners = Vec::new();
    let mut failure = None;
    for address in addresses {
        let listening = TcpListener::bind(address).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        match listening {
            Ok(listener) => listeners.push(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                return Err(format!("port {port} is in use (another job? set MASTER_PORT)"));
            }
            // Not all that a name means elsewhere is here.
            Err(error) => failure = Some((address, error)),
        }
    }
    match failure {
        Some((address, error)) if listeners.is_empty() && error.kind() == ErrorKind::AddrNotAvailable => Err(format!(
            "{} is no address of this machine, where rank 0 listens (MASTER_ADDR; DROPLESS_LISTEN names another one)",
            address.ip()
        )),
        Some((address, error)) if listeners.is_empty() => Err(format!("{address}: {error}")),
        _ => Ok(listeners),
    }
}

/// What a name means, each once.
fn addresses(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let mut all = Vec::new();
    for address in (host, port).to_socket_addrs()? {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    if all.is_empty() { Err(io::Error::other("the name has no address")) } else { Ok(all) }
}

/// Any other rank: finds rank 0, which may start later.
pub(super) fn join(world: &World, key: &Key, deadline: Instant, timeout: Duration) -> Met<TcpStream> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let (why, wait) = match call(world, key, left.clamp(RETRY_DENIED, GREETING)) {
            Ok(Said::Verdict(stream, Verdict::Welcome)) => return Ok(stream),
            Ok(Said::Verdict(_, Verdict::Refused(why))) => return Err(why),
            // It may be about to end.
            Ok(Said::Verdict(_, Verdict::OtherJob)) => ("another job is there".into(), RETRY_DENIED),
            // So may whoever that is. Nothing it says is believed.
            Ok(Said::Denied(why)) => (format!("who is there says {:?} (another job?)", shortened(&why)), RETRY_DENIED),
            Err(error) => (error.to_string(), RETRY),
        };
        if deadline.saturating_duration_since(Instant::now()) <= wait {
            return Err(format!("rank 0 was not found at {}:{} within {timeout:?}: {why}", world.host, world.port));
        }
        std::thread::sleep(wait);
    }
}

enum Said {
    Verdict(TcpStream, Verdict),
    Denied(String),
}

/// Greets what listens at rank 0's address.
fn call(world: &World, key: &Key, timeout: Duration) -> io::Result<Said> {
    let deadline = Instant::now() + timeout;
    let mut connection = Err(io::Error::other("the name has no address"));
    for address in addresses(&world.host, world.port)? {
        connection = TcpStream::connect_timeout(&address, timeout);
        if connection.is_ok() {
            break;
        }
    }
    let mut stream = connection?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(GREETING))?;
    let World { rank, ranks, .. } = *world;
    let hello = Hello { protocol: PROTOCOL, nonce: nonce()?, version: VERSION.into(), job: job(world), ranks, rank };
    let hello = line(&hello);
    stream.write_all(&hello)?;
    let asked = hear(&mut stream, deadline)?;
    match reply(&asked)? {
        Reply::Challenge { .. } => {}
        Reply::Denied(why) => return Ok(Said::Denied(why)),
        Reply::Answer { .. } => return Err(io::Error::other("it asks for no proof")),
    }
    let said = &hello[..hello.len() - 1];
    stream.write_all(&line(&Proof { proof: key.proof(Side::Joins, &[said, &asked]) }))?;
    match reply(&hear(&mut stream, deadline)?)? {
        Reply::Answer { verdict, proof } if key.proves(&proof, Side::Listens, &[said, &asked, &line(&verdict)]) => {
            Ok(Said::Verdict(stream, verdict))
        }
        Reply::Denied(why) => Ok(Said::Denied(why)),
        Reply::Answer { .. } => Err(io::Error::other("it does not have the job's secret")),
        Reply::Challenge { .. } => Err(io::Error::other("it asks twice for a proof")),
    }
}

fn reply(line: &[u8]) -> io::Result<Reply> {
    Reply::parse(line).map_err(|_| io::Error::other("it speaks another language"))
}

/// The next line of rank 0. Reads no byte past it, which would be lost to the reader that comes after.
fn hear(stream: &mut TcpStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut byte = [0];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::other("it does not answer"));
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut byte) {
            Ok(0) => return Err(io::Error::other("it closes the connection")),
            Ok(_) if byte == *b"\n" => return Ok(line),
            Ok(_) if line.len() == FIRST_LINE => return Err(io::Error::other("it speaks another language")),
            Ok(_) => line.push(byte[0]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
}

/// What somebody says, in a message.
fn shortened(why: &str) -> String {
    why.chars().take(100).collect()
}
