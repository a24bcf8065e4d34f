//! The exchange of rows between the ranks of one process, for every backend whose ranks share one. NUMERICS.md,
//! "Collectives": bytes are moved, unchanged.
//!
//! Each rank of a group posts its tensors and counts, and all look at all posts, so that every rank finds the same
//! disagreement before a byte has moved. Then each rank pulls its segments out of the others' send tensors, all at the same
//! time. A closing meeting holds the senders until nobody reads their tensors any more.

mod meeting;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Caps, Group};
use crate::error::{Error, Result};
use crate::ops::AllToAll;
use crate::tensor::{DType, Tensor};
use meeting::Meeting;

const OP: &str = "all_to_all";

/// What one rank brings to an exchange.
#[derive(Debug)]
pub struct Post {
    /// What it sends.
    pub send: Tensor,
    /// Where it receives.
    pub recv: Tensor,
    /// One segment goes to everyone.
    gathers: bool,
    format: Format,
    /// Rows for each member.
    sends: Vec<usize>,
    /// Rows from each member.
    expects: Vec<usize>,
}

/// A segment to copy: both ranges count bytes from the start of the view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The place of the member it comes from.
    pub source: usize,
    /// Where it lies in that member's send tensor.
    pub from: Range<usize>,
    /// Where it goes in this rank's receive tensor.
    pub to: Range<usize>,
}

/// What all members must have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Format {
    dtype: DType,
    /// Rows that a segment can hold.
    capacity: usize,
    /// Elements of a row.
    row: usize,
}

impl Format {
    /// The bytes of the first `rows` rows of a segment.
    fn bytes(self, segment: usize, rows: usize) -> Range<usize> {
        let row = self.row * self.dtype.size();
        let start = segment * self.capacity * row;
        start..start + rows * row
    }
}

impl Post {
    /// The post of a checked op; `counts` reads a tensor of row counts.
    ///
    /// # Errors
    /// Those of `counts`.
    pub fn new(op: &AllToAll<'_>, counts: impl Fn(&Tensor) -> Result<Vec<u32>>) -> Result<Post> {
        let shape = op.recv.shape();
        let format = Format { dtype: op.recv.dtype(), capacity: shape[1], row: shape[2..].iter().product() };
        let rows = |tensor: &Tensor| Ok(counts(tensor)?.iter().map(|&n| n as usize).collect());
        let (sends, expects) = match op.counts {
            Some(counts) => (rows(counts.send)?, rows(counts.recv)?),
            None => (vec![format.capacity; shape[0]], vec![format.capacity; shape[0]]),
        };
        Ok(Post { send: op.send.clone(), recv: op.recv.clone(), gathers: op.gathers(), format, sends, expects })
    }
}

/// The segments for the member at `place`, one from each member.
pub fn segments(place: usize, posts: &[Post]) -> impl Iterator<Item = Segment> {
    let Post { format, expects, .. } = &posts[place];
    posts.iter().enumerate().map(move |(source, post)| {
        let (segment, rows) = (if post.gathers { 0 } else { place }, expects[source]);
        Segment { source, from: format.bytes(segment, rows), to: format.bytes(source, rows) }
    })
}

/// Whether the exchange of these ranks can be done; if not, the first reason in their order, the same on every rank.
fn agree(ranks: &[usize], posts: &[Post]) -> std::result::Result<(), String> {
    let (one, first) = (ranks[0], posts[0].format);
    for (rank, post) in ranks.iter().zip(posts) {
        let format = post.format;
        if format.dtype != first.dtype {
            return Err(format!("rank {one} exchanges {:?}, but rank {rank} {:?}", first.dtype, format.dtype));
        }
        if format.capacity != first.capacity {
            let (a, b) = (first.capacity, format.capacity);
            return Err(format!("rank {one} has a capacity of {a} rows, but rank {rank} one of {b}"));
        }
        if format.row != first.row {
            return Err(format!("rank {one} has rows of {} elements, but rank {rank} of {}", first.row, format.row));
        }
    }
    for (from_place, (source, from)) in ranks.iter().zip(posts).enumerate() {
        for (to_place, (destination, to)) in ranks.iter().zip(posts).enumerate() {
            let (sent, expected, capacity) = (from.sends[to_place], to.expects[from_place], first.capacity);
            if sent != expected {
                return Err(format!("rank {source} sends {sent} rows to rank {destination}, which expects {expected}"));
            }
            if sent > capacity {
                return Err(format!(
                    "rank {source} sends {sent} rows to rank {destination}, but a segment holds {capacity}"
                ));
            }
            let shared =
                to.recv.shares_storage(&from.send) || from_place < to_place && to.recv.shares_storage(&from.recv);
            if shared {
                return Err(format!("rank {destination} receives into a buffer that rank {source} uses"));
            }
        }
    }
    Ok(())
}

/// What the ranks of a group share.
#[derive(Debug)]
struct Circle {
    members: Vec<usize>,
    opening: Meeting<Post>,
    closing: Meeting<()>,
}

impl Circle {
    fn new(members: Vec<usize>, timeout: Duration) -> Circle {
        let (opening, closing) = (Meeting::new(members.clone(), timeout), Meeting::new(members.clone(), timeout));
        Circle { members, opening, closing }
    }
}

/// One rank's place in the exchanges of its groups. When it is dropped, who waits for this rank fails.
#[derive(Debug)]
pub struct Exchange {
    rank: usize,
    /// Its groups in the order of [`Group::ALL`], and its place in each.
    circles: [(Arc<Circle>, usize); 3],
}

impl Exchange {
    /// The exchanges of ranks 0, 1 and so on, none of which waits for another longer than `timeout`.
    pub fn ranks(caps: &[Caps], timeout: Duration) -> Vec<Exchange> {
        let mut all: Vec<Exchange> = Vec::with_capacity(caps.len());
        for caps in caps {
            let circle = |group: Group| {
                // The first member of a group brings it into being; the others come later.
                let first = caps.members(group).next().and_then(|first| all.get(first));
                let new = || Arc::new(Circle::new(caps.members(group).collect(), timeout));
                (first.map_or_else(new, |first| first.circle(group).0.clone()), caps.place(group))
            };
            let circles = Group::ALL.map(circle);
            all.push(Exchange { rank: caps.rank, circles });
        }
        all
    }

    fn circle(&self, group: Group) -> &(Arc<Circle>, usize) {
        &self.circles[group as usize]
    }

    /// This rank's part in an exchange of a group: `pull` gets its place and the posts of all members by place, and copies
    /// its [`segments`].
    ///
    /// # Errors
    /// [`Error::Collective`] when ranks disagree, left or did not arrive in time; those of `pull`.
    pub fn run(&self, group: Group, post: Post, pull: impl FnOnce(usize, &[Post]) -> Result<()>) -> Result<()> {
        let failed = |what| Error::Collective { rank: self.rank, op: OP, what };
        let (circle, place) = self.circle(group);
        let posts = circle.opening.gather(*place, post).map_err(failed)?;
        agree(&circle.members, &posts).map_err(failed)?;
        pull(*place, &posts)?;
        circle.closing.gather(*place, ()).map_err(failed)?;
        Ok(())
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        for (circle, place) in &self.circles {
            circle.opening.leave(*place);
            circle.closing.leave(*place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b022_byte_ranges_pass_32_bits() {
        let format = Format { dtype: DType::Bf16, capacity: 300_000, row: 7168 };
        assert_eq!(format.bytes(0, 300_000), 0..4_300_800_000);
        assert_eq!(format.bytes(1, 300_000), 4_300_800_000..8_601_600_000);
    }
}
