//! Sums over tokens, shards and parameters. What is added in which order is fixed; threads take whole sums or blocks.

use std::ops::Range;

use rayon::prelude::*;

use super::Simd;
use super::tree::{Tree, sum_along};
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut};
use crate::host::simd;
use crate::numerics::reduce::TOKEN_BLOCK;
use crate::ops::{SumRows, SumSquares, TreeSum};

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

pub(super) fn sum_rows(op: &SumRows<'_>, simd: Simd) -> Result<()> {
    let x = memory::input(SumRows::OP, op.x)?;
    let mut out = memory::output(SumRows::OP, op.out)?;
    let x = x.floats();
    let sums = token_sums(op.x.rows(), op.x.cols(), op.out.rows(), |block, sums| {
        simd::with(
            simd,
            #[inline(always)]
            || row_block(x, block, sums),
        )
    });
    out.f32().copy_from_slice(&sums);
    Ok(())
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

pub(super) fn sum_squares(op: &SumSquares<'_>, simd: Simd) -> Result<()> {
    let x = memory::input(SumSquares::OP, op.x)?;
    let mut out = memory::output(SumSquares::OP, op.out)?;
    let (x, cols) = (x.floats(), op.x.cols());
    let tile = memory::min_rows(cols);
    out.f32().par_chunks_mut(tile).enumerate().for_each(|(t, out)| {
        simd::with(
            simd,
            #[inline(always)]
            || square_tile(x, cols, t * tile, out),
        )
    });
    Ok(())
}

/// Rows from `first` on, one for each element of `out`.
#[inline(always)]
fn square_tile(x: Floats<'_>, cols: usize, first: usize, out: &mut [f32]) {
    let mut x_row = Vec::new();
    for (i, out) in out.iter_mut().enumerate() {
        *out = SumSquares::row(x.row(first + i, cols, &mut x_row));
    }
}

pub(super) fn tree_sum(op: &TreeSum<'_>, simd: Simd) -> Result<()> {
    /// Elements of a tile: few enough that the tree's levels stay in a core's first cache.
    const TILE: usize = 1024;
    let parts = memory::input(TreeSum::OP, op.parts)?;
    let mut out = memory::output(TreeSum::OP, op.out)?;
    let (parts, len) = (parts.floats(), op.out.len());
    let count = op.parts.shape().first().copied().unwrap_or(0);
    let mut tree = Tree::default();
    tree.plan(0, count, (0..count).map(|part| (part, part * len)));
    let tree = &tree;
    out.floats().pieces(TILE).into_par_iter().enumerate().for_each(|(t, out)| {
        simd::with(
            simd,
            #[inline(always)]
            || tree_tile(parts, tree, t * TILE, out),
        )
    });
    Ok(())
}

/// The elements of every part from `from` on.
#[inline(always)]
fn tree_tile(parts: Floats<'_>, tree: &Tree, from: usize, out: FloatsMut<'_>) {
    let (mut out, mut levels) = (out, Vec::new());
    let len = out.len();
    out.store(0, sum_along(tree, parts, from, len, &mut levels));
}
