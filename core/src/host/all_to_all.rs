//! The exchange of rows between the ranks of one process, in host memory.

use super::memory;
use crate::error::Result;
use crate::exchange::{Exchange, Post, segments};
use crate::ops::{AllToAll, Checked};

const OP: &str = "all_to_all";

/// The part of one rank.
pub(super) fn run(exchange: &Exchange, op: &Checked<AllToAll<'_>>) -> Result<()> {
    // A tensor of another backend must show before anyone waits.
    drop((memory::input(OP, op.send)?, memory::output(OP, op.recv)?));
    let post = Post::new(op, |counts| Ok(memory::input(OP, counts)?.u32().to_vec()))?;
    exchange.run(op.group, post, |place, posts| {
        let mut recv = memory::output(OP, &posts[place].recv)?;
        for segment in segments(place, posts) {
            let send = memory::input(OP, &posts[segment.source].send)?;
            recv.bytes()[segment.to].copy_from_slice(&send.bytes()[segment.from]);
        }
        Ok(())
    })
}
