//! The exchange of rows between the ranks of one process. NUMERICS.md, "Collectives": bytes are moved, unchanged.
//!
//! Each rank posts its tensors and counts, and all look at all posts, so that every rank finds the same disagreement
//! before a byte has moved. Then each rank pulls its chunks out of the others' send tensors, all at the same time. A
//! closing meeting holds the senders until nobody reads their tensors any more.

use std::ops::Range;
use std::time::Duration;

use super::meeting::Meeting;
use super::memory;
use crate::error::{Error, Result};
use crate::ops::{AllToAll, Checked};
use crate::tensor::{DType, Tensor};

const OP: &str = "all_to_all";

/// What one rank brings to an exchange.
#[derive(Debug)]
struct Post {
    send: Tensor,
    recv: Tensor,
    /// One chunk goes to everyone.
    gathers: bool,
    format: Format,
    /// Rows for each rank.
    sends: Vec<usize>,
    /// Rows from each rank.
    expects: Vec<usize>,
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
    fn new(op: &AllToAll<'_>) -> Result<Post> {
        // A tensor of another backend must show before anyone waits.
        drop((memory::input(OP, op.send)?, memory::output(OP, op.recv)?));
        let shape = op.recv.shape();
        let format = Format { dtype: op.recv.dtype(), capacity: shape[1], row: shape[2..].iter().product() };
        let rows = |counts: &Tensor| Ok(memory::input(OP, counts)?.u32().iter().map(|&n| n as usize).collect());
        let (sends, expects) = match op.counts {
            Some(counts) => (rows(counts.send)?, rows(counts.recv)?),
            None => (vec![format.capacity; shape[0]], vec![format.capacity; shape[0]]),
        };
        Ok(Post { send: op.send.clone(), recv: op.recv.clone(), gathers: op.gathers(), format, sends, expects })
    }
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
pub(super) struct Exchange {
    opening: Meeting<Post>,
    closing: Meeting<()>,
}

impl Exchange {
    /// An exchange of `ranks` ranks, none of which waits for another longer than `timeout`.
    pub(super) fn new(ranks: usize, timeout: Duration) -> Self {
        Exchange { opening: Meeting::new(ranks, timeout), closing: Meeting::new(ranks, timeout) }
    }

    /// `rank` takes part no more; who waits for it fails.
    pub(super) fn leave(&self, rank: usize) {
        self.opening.leave(rank);
        self.closing.leave(rank);
    }

    /// The part of `rank`.
    pub(super) fn run(&self, rank: usize, op: &Checked<AllToAll<'_>>) -> Result<()> {
        let failed = |what| Error::Collective { rank, op: OP, what };
        let posts = self.opening.gather(rank, Post::new(op)?).map_err(failed)?;
        agree(&posts).map_err(failed)?;
        pull(rank, &posts)?;
        self.closing.gather(rank, ()).map_err(failed)?;
        Ok(())
    }
}

/// Copies the chunks for `rank` out of every rank's send tensor.
fn pull(rank: usize, posts: &[Post]) -> Result<()> {
    let Post { recv, format, expects, .. } = &posts[rank];
    let mut recv = memory::output(OP, recv)?;
    for (source, post) in posts.iter().enumerate() {
        let chunk = if post.gathers { 0 } else { rank };
        let send = memory::input(OP, &post.send)?;
        let rows = expects[source];
        recv.bytes()[format.bytes(source, rows)].copy_from_slice(&send.bytes()[format.bytes(chunk, rows)]);
    }
    Ok(())
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
