//! Ranks that meet, talk, fail and leave, in threads and in processes.

use std::io::{BufRead, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket};
use std::process::{Command, Stdio};

use dropless_core::world::{SECRET, SECRET_FILE, Secret};

use super::admission::{join, listen};
use super::*;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

/// A port of this machine at which nobody listens.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// The secret of the jobs here.
const KNOWN: &str = "known to the ranks of this job";

/// A rank of a job on this machine.
pub(crate) fn world(rank: usize, ranks: usize, port: u16) -> World {
    let secret = Some(Secret::new(KNOWN.as_bytes()).unwrap());
    let (host, listen) = ("127.0.0.1".into(), None);
    World { rank, ranks, local_rank: rank, host, port, listen, one_machine: true, job: "test".into(), secret }
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
            .env(SECRET, KNOWN)
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

/// Both ends of a job of two ranks that have met: rank 0's, or rank 1's, and a connection that plays the other.
fn met(rank: usize) -> (Control, TcpStream) {
    let port = free_port();
    let me = std::thread::spawn(move || Control::connect(&world(rank, 2, port), LONG).unwrap());
    let other = world(1 - rank, 2, port);
    let key = Key::of(other.secret.as_ref().unwrap());
    let deadline = Instant::now() + LONG;
    let stream = match rank {
        0 => join(&other, &key, deadline, LONG).unwrap(),
        _ => listen(&other, &key, deadline, LONG).unwrap().remove(&1).unwrap(),
    };
    (me.join().unwrap(), stream)
}

#[test]
fn f20_whoever_does_not_have_the_secret_is_not_taken_in() {
    let port = free_port();
    let zero = std::thread::spawn(move || Control::connect(&world(0, 2, port), LONG).map(|_| ()));
    // Knows all but the secret.
    let stranger = World { secret: Some(Secret::new(b"guessed to be the secret").unwrap()), ..world(1, 2, port) };
    let error = Control::connect(&stranger, SHORT).unwrap_err().to_string();
    assert!(error.ends_with("says \"this process does not have the job's secret\" (another job?)"), "{error}");
    assert!(!zero.is_finished(), "a stranger ends the wait for the ranks");
    Control::connect(&world(1, 2, port), LONG).unwrap();
    zero.join().unwrap().unwrap();
    // Rank 0 says what may have been the reason.
    let port = free_port();
    let zero = std::thread::spawn(move || Control::connect(&world(0, 2, port), 2 * SHORT).unwrap_err().to_string());
    Control::connect(&World { port, ..stranger }, SHORT).unwrap_err();
    let why = zero.join().unwrap();
    assert!(why.ends_with("came without the job's secret (is DROPLESS_SECRET the same for all ranks?)"), "{why}");
}

#[test]
fn f20_several_ranks_without_a_secret_do_not_even_look_for_each_other() {
    for rank in [0, 1] {
        let error = Control::connect(&World { secret: None, ..world(rank, 2, 9) }, LONG).unwrap_err().to_string();
        assert!(error.starts_with("environment: DROPLESS_SECRET is not set"), "{error}");
    }
}

#[test]
fn f20_nobody_is_taken_for_rank_0_without_the_secret() {
    const CHALLENGE: &str =
        r#"{"Challenge":{"nonce":"0000000000000000000000000000000000000000000000000000000000000000"}}"#;
    let cases: [(&[&str], &str); 5] = [
        (&[r#"{"Answer":{"verdict":"Welcome","proof":""}}"#], "it asks for no proof"),
        (&[CHALLENGE, r#"{"Answer":{"verdict":"Welcome","proof":""}}"#], "it does not have the job's secret"),
        // What the rank has said of itself, said back.
        (&[CHALLENGE, r#"{"Answer":{"verdict":"Welcome","proof":"PROOF"}}"#], "it does not have the job's secret"),
        (&[CHALLENGE, CHALLENGE], "it asks twice for a proof"),
        (&[r#""Welcome""#], "it speaks another language"),
    ];
    for (answers, why) in cases {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let one = std::thread::spawn(move || Control::connect(&world(1, 2, port), SHORT).unwrap_err().to_string());
        while !one.is_finished() {
            listener.set_nonblocking(true).unwrap();
            let Ok((mut stream, _)) = listener.accept() else { continue };
            stream.set_nonblocking(false).unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            for answer in answers {
                let Some(Ok(said)) = lines.next() else { break };
                let proof = said.strip_prefix(r#"{"proof":""#).and_then(|rest| rest.strip_suffix(r#""}"#));
                let _ = writeln!(stream, "{}", answer.replace("PROOF", proof.unwrap_or_default()));
            }
        }
        let error = one.join().unwrap();
        assert!(error.ends_with(why), "{error}");
    }
}

#[test]
fn f20_the_secret_is_never_said_and_a_proof_is_good_once() {
    let (port, watched) = (free_port(), TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let at = watched.local_addr().unwrap().port();
    let zero = std::thread::spawn(move || Control::connect(&world(0, 2, port), LONG).unwrap());
    let one = std::thread::spawn(move || Control::connect(&world(1, 2, at), LONG).unwrap());
    let (mut from, _) = watched.accept().unwrap();
    let mut to = loop {
        if let Ok(stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
            break stream;
        }
    };
    // Passes on a line from each side until they have met.
    let [mut hellos, mut answers] = [&from, &to].map(|stream| BufReader::new(stream.try_clone().unwrap()));
    let mut said = Vec::new();
    for _ in 0..2 {
        for (lines, out) in [(&mut hellos, &mut to), (&mut answers, &mut from)] {
            let mut line = String::new();
            lines.read_line(&mut line).unwrap();
            out.write_all(line.as_bytes()).unwrap();
            said.push(line);
        }
    }
    let all = said.concat();
    let digits = String::from(Bytes(KNOWN.as_bytes().to_vec()));
    assert!(all.contains("Welcome") && !all.contains(KNOWN) && !all.contains(&digits), "{all}");
    drop((zero.join().unwrap(), one.join().unwrap()));
    // Said again, it proves nothing: rank 0 asks something else.
    let again = free_port();
    let zero = std::thread::spawn(move || Control::connect(&world(0, 2, again), LONG).map(|_| ()));
    let mut stream = loop {
        if let Ok(stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, again)) {
            break stream;
        }
    };
    let mut answers = BufReader::new(stream.try_clone().unwrap()).lines();
    stream.write_all(said[0].as_bytes()).unwrap();
    let _ = answers.next().unwrap().unwrap();
    stream.write_all(said[2].as_bytes()).unwrap();
    let answer = answers.next().unwrap().unwrap();
    assert_eq!(answer, r#"{"Denied":"this process does not have the job's secret"}"#);
    Control::connect(&world(1, 2, again), LONG).unwrap();
    zero.join().unwrap().unwrap();
}

/// How long somebody is listened to who speaks like this.
fn dropped(port: u16, speak: impl Fn(&mut TcpStream) -> io::Result<()>) -> Duration {
    let mut stream = loop {
        if let Ok(stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
            break stream;
        }
    };
    stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let started = Instant::now();
    loop {
        let ended = match stream.read(&mut [0; 256]) {
            Ok(0) => true,
            Ok(_) => false,
            Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
        };
        if ended || speak(&mut stream).is_err() {
            return started.elapsed();
        }
        assert!(started.elapsed() < LONG, "a stranger is listened to for ever");
    }
}

#[test]
fn f20_before_admission_lines_times_and_connections_are_bounded() {
    let port = free_port();
    let zero = std::thread::spawn(move || Control::connect(&world(0, 2, port), LONG).map(|_| ()));
    let slowly = |stream: &mut TcpStream| {
        std::thread::sleep(Duration::from_millis(100));
        stream.write_all(b"{")
    };
    let at_once = |stream: &mut TcpStream| stream.write_all(&[b'{'; 100]);
    std::thread::scope(|s| {
        let slow = s.spawn(move || dropped(port, slowly));
        assert!(dropped(port, at_once) < GREETING / 2, "a line has no end");
        assert!(dropped(port, |stream| stream.write_all(b"{}\n{}\n")) < GREETING / 2, "two lines at once");
        let slow = slow.join().unwrap();
        assert!(slow > GREETING / 2 && slow < GREETING + Duration::from_secs(2), "{slow:?}");
    });
    // The oldest of many goes first, and none of them keeps a rank from coming.
    let many: Vec<_> = (0..200).map(|_| TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap()).collect();
    let started = Instant::now();
    assert_eq!((&many[0]).read(&mut [0]).unwrap_or(0), 0);
    assert!(started.elapsed() < GREETING / 2, "{:?}", started.elapsed());
    Control::connect(&world(1, 2, port), LONG).unwrap();
    zero.join().unwrap().unwrap();
    assert!(started.elapsed() < GREETING, "{:?}", started.elapsed());
}

#[test]
fn f20_rank_0_listens_at_the_address_of_master_addr_alone() {
    // Where packets to the rest of the world would leave; nothing is sent.
    let outside = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    let mut choices = vec![(IpAddr::from(Ipv4Addr::new(127, 0, 0, 2)), IpAddr::from(Ipv4Addr::LOCALHOST))];
    choices.extend(outside.ok().map(|address| (address.ip(), Ipv4Addr::LOCALHOST.into())));
    for (address, other) in choices {
        let port = free_port();
        let at = move |rank| World { host: address.to_string(), ..world(rank, 2, port) };
        let zero = std::thread::spawn(move || Control::connect(&at(0), LONG).map(|_| ()));
        while TcpStream::connect((address, port)).is_err() {
            assert!(!zero.is_finished());
        }
        assert!(TcpStream::connect((other, port)).is_err(), "it listens at {other}, too, not only at {address}");
        Control::connect(&at(1), LONG).unwrap();
        zero.join().unwrap().unwrap();
    }
    // An address that is not here, and one that is given instead.
    let elsewhere = World { host: "192.0.2.1".into(), ..world(0, 2, free_port()) };
    let error = Control::connect(&elsewhere, SHORT).unwrap_err().to_string();
    assert!(error.contains("192.0.2.1 is no address of this machine, where rank 0 listens"), "{error}");
    let given = World { listen: Some(Ipv6Addr::LOCALHOST.into()), ..elsewhere.clone() };
    let given = [given, World { listen: Some(Ipv4Addr::LOCALHOST.into()), ..elsewhere }];
    let errors = given.map(|given| Control::connect(&given, SHORT).unwrap_err().to_string());
    assert!(errors[1].contains("rank 1 did not come to 192.0.2.1"), "{errors:?}");
}

#[test]
fn f20_what_a_rank_may_not_say_is_an_error_with_its_name() {
    let to_zero = [
        (
            r#"{"Gathered":{"members":[0,1],"values":["",""]}}"#,
            "the parts of an exchange, which are for rank 0 to send",
        ),
        (r#"{"Brings":{"members":[0,2],"value":""}}"#, "an exchange between ranks [0, 2] of 2"),
        (r#"{"Brings":{"members":[1,0],"value":""}}"#, "an exchange between ranks [1, 0] of 2"),
        (r#"{"Brings":{"members":[],"value":""}}"#, "an exchange between ranks [] of 2"),
        (r#"{"Brings":{"members":[0,1],"value":"abc"}}"#, "no message: half a byte at line 1 column 41"),
        (r#"{"Left":{"rank":0,"ended":[0,0,0]}}"#, "rank 0 left"),
        (r#"{"Left":{"rank":2,"ended":[0,0,0]}}"#, "rank 2 of 2 left"),
        (r#""Why""#, "no message: unknown variant `Why`"),
        ("\u{1b}[2J", "no message: expected value at line 1 column 1"),
    ];
    for (said, what) in to_zero {
        let (control, mut stream) = met(0);
        writeln!(stream, "{said}").unwrap();
        let (why, _) = noticed(&control);
        assert!(why.starts_with(&format!("rank 1 says what no rank says: {what}")), "{why}");
        // The rank learns it, and no more is taken from it.
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.starts_with("{\"Failed\":"), "{rest}");
    }
    let (control, mut stream) = met(0);
    (0..2).for_each(|_| writeln!(stream, r#"{{"Brings":{{"members":[0,1],"value":"07"}}}}"#).unwrap());
    assert!(noticed(&control).0.ends_with("a part of an exchange before its last one is over"));
    let (control, mut stream) = met(0);
    let _ = stream.write_all(&vec![b'['; control.shared.limits.line() + 2]);
    assert!(noticed(&control).0.starts_with("rank 1 is gone (a line of more than "));
}

#[test]
fn f20_what_rank_0_gathers_is_as_many_values_as_there_are_members() {
    let to_one = [
        (r#"{"Gathered":{"members":[0,1],"values":[]}}"#, "0 values of 2 ranks"),
        (r#"{"Gathered":{"members":[0,1],"values":["05"]}}"#, "1 values of 2 ranks"),
        (
            r#"{"Gathered":{"members":[0,1],"values":["05","08"]}}"#,
            "other parts of the exchange between ranks [0, 1] than",
        ),
        (r#"{"Brings":{"members":[0,1],"value":"05"}}"#, "a part of an exchange, which is for rank 0"),
        (r#"{"Left":{"rank":1,"ended":[0,0,0]}}"#, "rank 1 left"),
    ];
    for (said, what) in to_one {
        let (control, mut stream) = met(1);
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let waiting = std::thread::spawn(move || gather(&control, &[0, 1], 7).unwrap_err().to_string());
        assert_eq!(lines.next().unwrap().unwrap(), r#"{"Brings":{"members":[0,1],"value":"07"}}"#);
        writeln!(stream, "{said}").unwrap();
        let error = waiting.join().unwrap();
        assert!(error.starts_with(&format!("rank 1: test: rank 0 says what no rank says: {what}")), "{error}");
    }
    // And parts that nobody waits for.
    let (control, mut stream) = met(1);
    writeln!(stream, r#"{{"Gathered":{{"members":[0,1],"values":["05","07"]}}}}"#).unwrap();
    assert!(noticed(&control).0.ends_with("ranks [0, 1], which nobody waits for"));
}

#[test]
fn f20_what_is_no_exchange_is_refused_where_it_is_asked_for() {
    let (control, _stream) = met(0);
    let refused =
        |members: &[usize], bytes| control.gather("test", members, vec![0; bytes], SHORT).unwrap_err().to_string();
    assert_eq!(refused(&[1], 0), "rank 0: test: not one of the ranks [1]");
    assert_eq!(refused(&[1, 0], 0), "rank 0: test: an exchange between ranks [1, 0] of 2");
    assert_eq!(refused(&[0, 1], 5000), "rank 0: test: a value of 5000 bytes, expected at most 4112");
    assert_eq!(refused(&[0, 1], 0), "rank 0: test: ranks [0, 1] did not all come within 300ms");
    assert_eq!(refused(&[0, 1], 0), "rank 0: test: an exchange with ranks [0, 1] is not over");
}

/// A process that the tests below start; does nothing among the other tests.
#[test]
fn process_that_meets() {
    if std::env::var_os("DROPLESS_TEST_MEETS").is_none() {
        return;
    }
    let world = World::from_environment().unwrap().unwrap();
    let control = Control::connect(&world, LONG).unwrap();
    let all = gather(&control, &[0, 1], u8::try_from(world.rank).unwrap()).unwrap();
    assert_eq!(all, [[0], [1]]);
    control.leave([0; 3]);
}

#[test]
fn f20_processes_with_the_secret_meet_however_they_were_started() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("secret");
    std::fs::write(&file, format!("{KNOWN}\n")).unwrap();
    let file = file.to_str().unwrap().to_owned();
    let torchrun = |rank: &str, port: &str| {
        [("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", port)]
            .map(|(name, value)| (name, value.to_owned()))
            .to_vec()
    };
    let slurm = |rank: &str, port: &str| {
        [
            ("SLURM_PROCID", rank),
            ("SLURM_LOCALID", rank),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_STEP_TASKS_PER_NODE", "2"),
            ("SLURM_STEP_NODELIST", "gpu1"),
            ("SLURM_JOB_ID", "1234"),
            ("MASTER_PORT", port),
        ]
        .map(|(name, value)| (name, value.to_owned()))
        .to_vec()
    };
    let mpi = |rank: &str, port: &str| {
        [
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("MASTER_PORT", port),
        ]
        .map(|(name, value)| (name, value.to_owned()))
        .to_vec()
    };
    type Start<'a> = &'a dyn Fn(&str, &str) -> Vec<(&'static str, String)>;
    let starts: [(Start<'_>, &str, &str); 3] =
        [(&torchrun, SECRET_FILE, &file), (&slurm, SECRET_FILE, &file), (&mpi, SECRET, KNOWN)];
    for (start, secret, value) in starts {
        let port = free_port().to_string();
        let run = |rank: &str| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "comm::control::tests::process_that_meets"])
                .envs(start(rank, &port))
                .env(secret, value)
                .env("DROPLESS_TEST_MEETS", "1")
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        };
        for process in [run("1"), run("0")] {
            let output = process.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
    }
}

/// A process that [`f17_ranks_that_get_no_thread_to_hear_each_other_say_so`] starts; does nothing among the other tests.
#[cfg(target_os = "linux")]
#[test]
fn process_without_threads() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if std::env::var_os("DROPLESS_TEST_THREADS").is_none() {
        return;
    }
    let port = free_port();
    let (limited, limit) = std::sync::mpsc::channel();
    let one = std::thread::spawn(move || {
        limit.recv().unwrap();
        Control::connect(&world(1, 2, port), LONG).unwrap_err().to_string()
    });
    // No room for a stack any more.
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    let most = Rlimit { current: Some(pages * 4096 + (1 << 20)), ..getrlimit(Resource::As) };
    setrlimit(Resource::As, most).unwrap();
    if std::thread::Builder::new().spawn(|| ()).is_ok() {
        println!("granted");
        std::process::exit(0);
    }
    limited.send(()).unwrap();
    let zero = Control::connect(&world(0, 2, port), LONG).unwrap_err().to_string();
    println!("refused: {zero}\nrefused: {}", one.join().unwrap());
}

#[cfg(target_os = "linux")]
#[test]
fn f17_ranks_that_get_no_thread_to_hear_each_other_say_so() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "comm::control::tests::process_without_threads", "--nocapture"])
        .env("DROPLESS_TEST_THREADS", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    if said.contains("granted") {
        println!("skipped: this system grants threads beyond the limit of the address space");
        return;
    }
    let said: Vec<&str> = said.lines().filter_map(|line| line.split_once("refused: ")).map(|(_, why)| why).collect();
    for (rank, why) in said.iter().enumerate() {
        assert!(why.starts_with(&format!("rank {rank}: bootstrap: no thread to hear the others: ")), "{why}");
    }
    assert_eq!(said.len(), 2, "{output:?}");
}
