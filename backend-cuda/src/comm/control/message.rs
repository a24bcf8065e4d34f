//! The lines that the processes of a job send each other: their form, and what one of them may say. docs/protocol.md has
//! all of it.

use std::io::{self, BufRead, Read};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::proof::NONCE;

/// The form of the lines. One that understands another cannot be talked to.
pub(super) const PROTOCOL: u32 = 1;
/// Bytes of a line before its sender has proven that it belongs to the job.
pub(super) const FIRST_LINE: usize = 2048;
/// Characters of a reason.
const REASON: usize = 1000;

/// Exchanges that a rank has ended in the groups World, Experts and Replicas; modulo 2^32.
pub(crate) type Ended = [u32; 3];

/// Bytes, in a line as hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(super) struct Bytes(pub(super) Vec<u8>);

impl From<Bytes> for String {
    fn from(bytes: Bytes) -> String {
        bytes.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl TryFrom<String> for Bytes {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Bytes, &'static str> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err("not hexadecimal"),
        };
        let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return Err("half a byte") };
        pairs.iter().map(|&[high, low]| Ok(digit(high)? << 4 | digit(low)?)).collect::<Result<_, _>>().map(Bytes)
    }
}

/// Which form of lines somebody speaks, who may say more that is not understood here.
#[derive(Debug, Deserialize)]
pub(super) struct Speaks {
    pub(super) protocol: u32,
}

/// The first words of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Hello {
    pub(super) protocol: u32,
    pub(super) nonce: Bytes,
    pub(super) version: String,
    /// A hash of the job's name.
    pub(super) job: Bytes,
    pub(super) ranks: usize,
    pub(super) rank: usize,
}

/// The second ones.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Proof {
    pub(super) proof: Bytes,
}

/// What rank 0 says before it has taken a rank in.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Reply {
    Challenge {
        nonce: Bytes,
    },
    /// It does not know whether the other belongs to the job.
    Denied(String),
    /// It does, and proves that it belongs to it, too.
    Answer {
        verdict: Verdict,
        proof: Bytes,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Verdict {
    Welcome,
    /// Rank 0 belongs to another job with the same secret, which may be about to end.
    OtherJob,
    /// The ranks do not belong together.
    Refused(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Message {
    /// A rank's part of an exchange of values between `members`.
    Brings { members: Vec<usize>, value: Bytes },
    /// Everyone's part.
    Gathered { members: Vec<usize>, values: Vec<Bytes> },
    /// Nobody can go on.
    Failed(String),
    /// A rank has ended all its exchanges and will take part in none any more.
    Left { rank: usize, ended: Ended },
    /// The sender does something long by itself, or is back. Of rank 0: any rank does, or none.
    Busy(bool),
    /// Rank 0 asks whether a rank is there, and so shows that it is; the rank says the same.
    Here,
}

/// How much one process may say to another, in a job of so many ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) ranks: usize,
}

impl Limits {
    /// Bytes of a value: what a rank knows of each other one, and of itself.
    pub(super) fn value(self) -> usize {
        4096 + 8 * self.ranks
    }

    /// Bytes of a line: everyone's values, or a reason, each character of which may be an escape.
    pub(super) fn line(self) -> usize {
        6 * 4 * REASON + 64 + self.ranks * (2 * self.value() + 16)
    }

    /// Whether ranks are `members` of an exchange: at least two, in ascending order.
    pub(super) fn check_members(self, members: &[usize]) -> Result<(), String> {
        let ascends = members.is_sorted_by(|a, b| a < b);
        if members.len() < 2 || !ascends || members.iter().any(|&rank| rank >= self.ranks) {
            return Err(format!("an exchange between ranks {members:?} of {}", self.ranks));
        }
        Ok(())
    }

    /// Whether a value is not too long.
    pub(super) fn check_value(self, value: &[u8]) -> Result<(), String> {
        let most = self.value();
        if value.len() <= most {
            Ok(())
        } else {
            Err(format!("a value of {} bytes, expected at most {most}", value.len()))
        }
    }
}

impl Hello {
    /// # Errors
    /// What is wrong with the line.
    pub(super) fn parse(line: &[u8]) -> Result<Hello, String> {
        let Speaks { protocol } = first(line)?;
        if protocol != PROTOCOL {
            return Err(format!("it speaks protocol {protocol}, rank 0 protocol {PROTOCOL}"));
        }
        let hello: Hello = first(line)?;
        check_nonce(&hello.nonce)?;
        Ok(hello)
    }
}

impl Proof {
    /// # Errors
    /// What is wrong with the line.
    pub(super) fn parse(line: &[u8]) -> Result<Proof, String> {
        first(line)
    }
}

impl Reply {
    /// # Errors
    /// What is wrong with the line.
    pub(super) fn parse(line: &[u8]) -> Result<Reply, String> {
        let reply = first(line)?;
        if let Reply::Challenge { nonce } = &reply {
            check_nonce(nonce)?;
        }
        Ok(reply)
    }
}

impl Message {
    /// A line, as far as it can be judged by itself.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(line: &[u8], limits: Limits) -> Result<Message, String> {
        let most = limits.line();
        if line.len() > most {
            return Err(format!("a line of more than {most} bytes"));
        }
        // Elements take more memory than the digit or two that they may have in a line.
        let (commas, most) = (line.iter().filter(|&&byte| byte == b',').count(), 2 * limits.ranks + REASON);
        if commas > most {
            return Err(format!("a line of {commas} elements, expected at most {most}"));
        }
        let message = json(line)?;
        match &message {
            Message::Brings { members, value } => {
                limits.check_members(members)?;
                limits.check_value(&value.0)?;
            }
            Message::Gathered { members, values } => {
                limits.check_members(members)?;
                if values.len() != members.len() {
                    return Err(format!("{} values of {} ranks", values.len(), members.len()));
                }
                values.iter().try_for_each(|value| limits.check_value(&value.0))?;
            }
            Message::Failed(why) if why.chars().count() > REASON => return Err("a reason without end".into()),
            Message::Left { rank, .. } if *rank >= limits.ranks => {
                return Err(format!("rank {rank} of {} left", limits.ranks));
            }
            Message::Failed(_) | Message::Left { .. } | Message::Busy(_) | Message::Here => {}
        }
        Ok(message)
    }
}

/// A reason that is not too long.
pub(super) fn reason(why: &str) -> String {
    why.chars().take(REASON).collect()
}

fn check_nonce(nonce: &Bytes) -> Result<(), String> {
    if nonce.0.len() == NONCE { Ok(()) } else { Err(format!("a nonce of {} bytes, expected {NONCE}", nonce.0.len())) }
}

fn first<T: DeserializeOwned>(line: &[u8]) -> Result<T, String> {
    if line.len() > FIRST_LINE { Err(format!("a first line of more than {FIRST_LINE} bytes")) } else { json(line) }
}

fn json<T: DeserializeOwned>(line: &[u8]) -> Result<T, String> {
    serde_json::from_slice(line).map_err(|error| format!("no message: {error}"))
}

/// A message as a line.
pub(super) fn line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("plain data");
    line.push(b'\n');
    line
}

/// The next line, without its end; None at the end of the connection. No more than `limit` bytes are read for it.
pub(super) fn read_line(lines: &mut impl BufRead, limit: usize) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    lines.take(limit as u64 + 1).read_until(b'\n', &mut line)?;
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        Some(_) if line.len() < limit => Err(io::ErrorKind::UnexpectedEof.into()),
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, format!("a line of more than {limit} bytes"))),
    }
}
