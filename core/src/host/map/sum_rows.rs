//! Column sums by the token-sum rule: threads take whole blocks.

use std::ops::Range;

use rayon::prelude::*;

use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory::{self, Floats};
use crate::host::simd;
use crate::numerics::reduce::TOKEN_BLOCK;
use crate::ops::SumRows;

/// The rows of one block of the token-sum rule.
pub(super) type BlockRows = Range<usize>;

/// Column sums `[groups, cols]` of groups of equally many rows by the token-sum rule; `block` writes the sums of one block.
pub(super) fn token_sums(
    rows: usize,
    cols: usize,
    groups: usize,
    block: impl Fn(BlockRows, &mut [f32]) + Sync,
) -> Vec<f32> {
    let group = rows / groups;
    let blocks = group.div_ceil(TOKEN_BLOCK);
    let mut partial = vec![0.0f32; groups * blocks * cols];
    partial.par_chunks_mut(cols.max(1)).enumerate().for_each(|(b, sums)| {
        let (group_start, start) = (b / blocks * group, b % blocks * TOKEN_BLOCK);
        block(group_start + start..group_start + group.min(start + TOKEN_BLOCK), sums);
    });
    let mut total = vec![0.0f32; groups * cols];
    if blocks > 0 && cols > 0 {
        for (total, partial) in total.chunks_mut(cols).zip(partial.chunks(blocks * cols)) {
            total.copy_from_slice(&partial[..cols]);
            for sums in partial[cols..].chunks(cols) {
                Floats::F32(sums).add_to(0, total);
            }
        }
    }
    total
}

impl Fast for SumRows<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        let x = memory::input(SumRows::OP, self.x)?;
        let mut out = memory::output(SumRows::OP, self.out)?;
        let x = x.floats();
        let sums = token_sums(self.x.rows(), self.x.cols(), self.out.rows(), |block, sums| {
            simd::with(
                simd,
                #[inline(always)]
                || row_block(x, block, sums),
            )
        });
        out.f32().copy_from_slice(&sums);
        Ok(())
    }
}

/// The column sums of a block.
#[inline(always)]
fn row_block(x: Floats<'_>, block: BlockRows, sums: &mut [f32]) {
    let cols = sums.len();
    x.load(block.start * cols, sums);
    for r in block.skip(1) {
        x.add_to(r * cols, sums);
    }
}
