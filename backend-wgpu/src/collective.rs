//! The exchange of rows between the ranks of one process. They share one device, so rows never leave its memory.
//!
//! The counts are read back so that every rank finds the same disagreement before a byte has moved.

use dropless_core::exchange::{Exchange, Post, segments};
use dropless_core::ops::{AllToAll, Checked};
use dropless_core::{Result, Tensor};

use crate::buffer;
use crate::dispatch::Stream;
use crate::ops::copy;

const OP: &str = "all_to_all";

/// The part of one rank; `read` reads a tensor of counts.
pub(crate) fn run(
    exchange: &Exchange,
    stream: &Stream,
    op: &Checked<AllToAll<'_>>,
    read: impl Fn(&Tensor) -> Result<Vec<u32>>,
) -> Result<()> {
    // A tensor of another backend must show before anyone waits.
    for tensor in [op.send, op.recv] {
        buffer::of(OP, &stream.gpu, tensor)?;
    }
    let post = Post::new(op, read)?;
    // What others pull must be handed over before they do.
    stream.flush(OP)?;
    exchange.run(op.group, post, |place, posts| {
        for segment in segments(place, posts) {
            copy::run(stream, OP, &posts[segment.source].send, segment.from, &posts[place].recv, segment.to.start)?;
        }
        stream.flush(OP)
    })
}
