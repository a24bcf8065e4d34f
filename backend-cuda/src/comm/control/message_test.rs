//! Lines that are damaged at random: an error or a message comes back, and what a message says is taken or refused.

use dropless_tests::mutations::{Counted, mutations};
use parking_lot::{Condvar, Mutex};

use super::message::{Bytes, Hello, Limits, Message, PROTOCOL, Proof, Reply, Verdict, line};
use super::{Exchange, Shared, State};

#[global_allocator]
static MEMORY: Counted = Counted;

fn bytes(count: u8) -> Bytes {
    Bytes((0..count).collect())
}

/// One line of each kind, and then some.
fn messages() -> Vec<Message> {
    vec![
        Message::Brings { members: vec![0, 1, 2, 3], value: bytes(40) },
        Message::Brings { members: vec![1, 3], value: bytes(0) },
        Message::Gathered { members: vec![0, 1], values: vec![bytes(3), bytes(2)] },
        Message::Gathered { members: (0..4).collect(), values: vec![bytes(2); 4] },
        Message::Failed("rank 3 reports: it is \"broken\" \u{1b}[2J".into()),
        Message::Left { rank: 2, ended: [1, u32::MAX, 0] },
        Message::Busy(true),
        Message::Here,
    ]
}

/// One of four ranks without connections, in the middle of an exchange.
fn rank(rank: usize) -> Shared {
    let (members, place) = if rank < 2 { (vec![0, 1], rank) } else { ((0..4).collect(), rank) };
    let exchange = Exchange { members, place, value: bytes(2), gathered: None };
    Shared {
        rank,
        limits: Limits { ranks: 4 },
        peers: [].into(),
        relay: Mutex::default(),
        state: Mutex::new(State { exchange: Some(exchange), ..State::default() }),
        changed: Condvar::new(),
    }
}

#[test]
fn f20_damaged_messages_are_refused_or_taken() {
    let seeds: Vec<Vec<u8>> = messages().iter().map(line).collect();
    for (seed, message) in seeds.iter().zip(messages()) {
        assert_eq!(Message::parse(&seed[..seed.len() - 1], Limits { ranks: 4 }), Ok(message));
    }
    mutations("control message", &seeds, |text| {
        let limits = Limits { ranks: 4 };
        // Several of them in turn, as they would come to rank 0 and to another.
        for (to, from) in [(0, 1), (3, 0)] {
            let shared = rank(to);
            for text in text.split(|&byte| byte == b'\n') {
                let taken = Message::parse(text, limits).and_then(|message| shared.hear(from, message));
                assert!(taken.is_ok() || taken.is_err_and(|what| !what.is_empty()));
            }
            let state = shared.state.lock();
            assert!(state.left.len() <= 4 && state.brought.len() <= 1, "{state:?}");
            if let Some(Exchange { members, gathered: Some(gathered), .. }) = &state.exchange {
                assert_eq!(gathered.len(), members.len());
            }
        }
    });
}

#[test]
fn f20_damaged_first_lines_are_refused_or_taken() {
    let hello =
        Hello { protocol: PROTOCOL, nonce: bytes(32), version: "dropless 1".into(), job: bytes(32), ranks: 4, rank: 3 };
    let (hello, proof) = (line(&hello), line(&Proof { proof: bytes(32) }));
    assert!(Hello::parse(&hello).is_ok() && Proof::parse(&proof).is_ok());
    let verdicts = [Verdict::Welcome, Verdict::OtherJob, Verdict::Refused("two jobs at port 1?".into())];
    let mut replies: Vec<Vec<u8>> =
        verdicts.map(|verdict| line(&Reply::Answer { verdict, proof: bytes(32) })).into_iter().collect();
    replies.extend([line(&Reply::Challenge { nonce: bytes(32) }), line(&Reply::Denied("it speaks protocol 2".into()))]);
    assert!(replies.iter().all(|reply| Reply::parse(reply).is_ok()));
    mutations("first line of a rank", &[hello, proof], |line| {
        if let Ok(hello) = Hello::parse(line) {
            assert_eq!((hello.protocol, hello.nonce.0.len()), (PROTOCOL, 32));
        }
        let _ = Proof::parse(line);
    });
    mutations("first line of rank 0", &replies, |line| {
        if let Ok(Reply::Challenge { nonce }) = Reply::parse(line) {
            assert_eq!(nonce.0.len(), 32);
        }
    });
}

#[test]
fn f20_no_line_takes_much_more_memory_than_it_is_long() {
    let limits = Limits { ranks: 1024 };
    // As many elements as there is room for, each a digit and a comma in the line.
    let members = |count: usize| format!(r#"{{"Brings":{{"members":[{}0],"value":""}}}}"#, "0,".repeat(count));
    let values =
        |count: usize| format!(r#"{{"Gathered":{{"members":[0,1],"values":[{}""]}}}}"#, r#""","#.repeat(count));
    for text in [members(limits.line() / 3), values(limits.line() / 4)] {
        assert!(text.len() < limits.line() && text.len() > 4 << 20);
        assert!(Message::parse(text.as_bytes(), limits).unwrap_err().contains("elements, expected at most"));
    }
    // What every rank brings to all of them fits.
    let values = vec![Bytes(vec![7; limits.value()]); limits.ranks];
    let text = line(&Message::Gathered { members: (0..limits.ranks).collect(), values });
    assert!(Message::parse(&text[..text.len() - 1], limits).is_ok());
    let text = line(&Message::Failed("\u{1b}".repeat(1000)));
    assert!(Message::parse(&text[..text.len() - 1], Limits { ranks: 2 }).is_ok());
}
