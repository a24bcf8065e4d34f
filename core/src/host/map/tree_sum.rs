//! Sums along a binary tree on tiles of elements.

use rayon::prelude::*;

use super::tree::{Tree, sum_along};
use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut};
use crate::host::simd;
use crate::ops::TreeSum;

impl Fast for TreeSum<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        /// Elements of a tile: few enough that the tree's levels stay in a core's first cache.
        const TILE: usize = 1024;
        let parts = memory::input(TreeSum::OP, self.parts)?;
        let mut out = memory::output(TreeSum::OP, self.out)?;
        let (parts, len) = (parts.floats(), self.out.len());
        let count = self.parts.shape().first().copied().unwrap_or(0);
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
}

/// The elements of every part from `from` on.
#[inline(always)]
fn tree_tile(parts: Floats<'_>, tree: &Tree, from: usize, out: FloatsMut<'_>) {
    let (mut out, mut levels) = (out, Vec::new());
    let len = out.len();
    out.store(0, sum_along(tree, parts, from, len, &mut levels));
}
