//! The exchange of rows between the ranks of one process, for every backend whose ranks share one. NUMERICS.md,
//! "Collectives": bytes are moved, unchanged.
//!
//! Each rank posts its tensors and counts, and all look at all posts, so that every rank finds the same disagreement
//! before a byte has moved. Then each rank pulls its chunks out of the others' send tensors, all at the same time. A
//! closing meeting holds the senders until nobody reads their tensors any more.

mod meeting;

use std::ops::Range;
use std::time::Duration;

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
    /// One chunk goes to everyone.
    gathers: bool,
    format: Format,
    /// Rows for each rank.
    sends: Vec<usize>,
    /// Rows from each rank.
    expects: Vec<usize>,
}

/// A chunk to copy: both ranges count bytes from the start of the view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The rank it comes from.
    pub source: usize,
    /// Where it lies in that rank's send tensor.
    pub from: Range<usize>,
    /// Where it goes in this rank's receive tensor.
    pub to: Range<usize>,
}

/// What all ranks must have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Format {
    dtype: DType,
    /// Rows that a chunk can hold.
    capacity: usize,
    /// Elements of a row.
    row: usize,
}

impl Format {
    /// The bytes of the first `rows` rows of a chunk.
    fn bytes(self, chunk: usize, rows: usize) -> Range<usize> {
        let row = self.row * self.dtype.size();
        let start = chunk * self.capacity * row;
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

/// The chunks for `rank`, one from each rank.
pub fn chunks(rank: usize, posts: &[Post]) -> impl Iterator<Item = Chunk> {
    let Post { format, expects, .. } = &posts[rank];
    posts.iter().enumerate().map(move |(source, post)| {
        let (place, rows) = (if post.gathers { 0 } else { rank }, expects[source]);
        Chunk { source, from: format.bytes(place, rows), to: format.bytes(source, rows) }
    })
}

/// Whether the exchange can be done; if not, the first reason in the order of the ranks, the same on every rank.
fn agree(posts: &[Post]) -> std::result::Result<(), String> {
    let first = posts[0].format;
    for (rank, post) in posts.iter().enumerate() {
        let format = post.format;
        if format.dtype != first.dtype {
            return Err(format!("rank 0 exchanges {:?}, but rank {rank} {:?}", first.dtype, format.dtype));
        }
        if format.capacity != first.capacity {
            let (a, b) = (first.capacity, format.capacity);
            return Err(format!("rank 0 has a capacity of {a} rows, but rank {rank} one of {b}"));
        }
        if format.row != first.row {
            return Err(format!("rank 0 has rows of {} elements, but rank {rank} of {}", first.row, format.row));
        }
    }
    for (source, from) in posts.iter().enumerate() {
        for (destination, to) in posts.iter().enumerate() {
            let (sent, expected, capacity) = (from.sends[destination], to.expects[source], first.capacity);
            if sent != expected {
                return Err(format!("rank {source} sends {sent} rows to rank {destination}, which expects {expected}"));
            }
            if sent > capacity {
                return Err(format!(
                    "rank {source} sends {sent} rows to rank {destination}, but a chunk holds {capacity}"
                ));
            }
            let shared =
                to.recv.shares_storage(&from.send) || source < destination && to.recv.shares_storage(&from.recv);
            if shared {
                return Err(format!("rank {destination} receives into a buffer that rank {source} uses"));
            }
        }
    }
    Ok(())
}

/// What the ranks of one process share.
#[derive(Debug)]
pub struct Exchange {
    opening: Meeting<Post>,
    closing: Meeting<()>,
}

impl Exchange {
    /// An exchange of `ranks` ranks, none of which waits for another longer than `timeout`.
    pub fn new(ranks: usize, timeout: Duration) -> Self {
        Exchange { opening: Meeting::new(ranks, timeout), closing: Meeting::new(ranks, timeout) }
    }

    /// `rank` takes part no more; who waits for it fails.
    pub fn leave(&self, rank: usize) {
        self.opening.leave(rank);
        self.closing.leave(rank);
    }

    /// The part of `rank`: `pull` gets the posts of all ranks and copies the [`chunks`] of this one.
    ///
    /// # Errors
    /// [`Error::Collective`] when ranks disagree, left or did not arrive in time; those of `pull`.
    pub fn run(&self, rank: usize, post: Post, pull: impl FnOnce(&[Post]) -> Result<()>) -> Result<()> {
        let failed = |what| Error::Collective { rank, op: OP, what };
        let posts = self.opening.gather(rank, post).map_err(failed)?;
        agree(&posts).map_err(failed)?;
        pull(&posts)?;
        self.closing.gather(rank, ()).map_err(failed)?;
        Ok(())
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
