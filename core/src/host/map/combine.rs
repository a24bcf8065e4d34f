//! The results of each token added along a tree, on tiles of rows.

use rayon::prelude::*;

use super::tree::{Tree, sum_along};
use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut, Input};
use crate::host::simd;
use crate::ops::Combine;

/// What a tile of [`Combine`] reads.
#[derive(Clone, Copy)]
struct Choices<'a> {
    op: &'a Combine<'a>,
    x: Floats<'a>,
    slots: &'a [u32],
    ids: Option<&'a [u32]>,
    add: [Option<Floats<'a>>; 2],
}

impl Fast for Combine<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        const OP: &str = Combine::OP;
        let (x, slots, ids) =
            (memory::input(OP, self.x)?, memory::input(OP, self.slots)?, memory::input_opt(OP, self.ids)?);
        let add = [memory::input_opt(OP, self.add[0])?, memory::input_opt(OP, self.add[1])?];
        let mut out = memory::output(OP, self.out)?;
        let choices = Choices {
            op: self,
            x: x.floats(),
            slots: slots.u32(),
            ids: ids.as_ref().map(Input::u32),
            add: add.each_ref().map(|add| add.as_ref().map(Input::floats)),
        };
        let (cols, tile) = (self.out.cols(), memory::min_rows(self.out.cols()));
        out.floats().pieces(tile * cols).into_par_iter().enumerate().for_each(|(t, out)| {
            simd::with(
                simd,
                #[inline(always)]
                || combine_tile(choices, t * tile, out),
            )
        });
        Ok(())
    }
}

impl Choices<'_> {
    /// The leaves of a row that are there, in the order of the columns: id and slot.
    #[inline(always)]
    fn leaves(self, row: usize) -> impl Iterator<Item = (usize, usize)> {
        let (k, slots, (lo, hi)) = (self.op.slots.cols(), self.op.x.rows(), self.op.leaves);
        let leaf = move |at: usize| {
            let id = self.ids.map_or(lo + at % k, |ids| ids[at] as usize);
            (id, self.slots[at] as usize)
        };
        (row * k..(row + 1) * k).map(leaf).filter(move |&(id, slot)| (lo..hi).contains(&id) && slot < slots)
    }
}

/// Rows from `first` on.
#[inline(always)]
fn combine_tile(choices: Choices<'_>, first: usize, out: FloatsMut<'_>) {
    let (mut out, mut tree, mut stack) = (out, Tree::default(), Vec::new());
    let Combine { leaves: (lo, hi), window, .. } = *choices.op;
    let cols = choices.op.out.cols();
    for i in 0..out.len() / cols {
        let row = first + i;
        if window.is_some_and(|window| !window.contains(row)) {
            continue;
        }
        tree.plan(lo, hi, choices.leaves(row).map(|(id, slot)| (id, slot * cols)));
        let sum = sum_along(&tree, choices.x, 0, cols, &mut stack);
        for add in choices.add.into_iter().flatten() {
            add.add_to(row * cols, sum);
        }
        out.store(i * cols, sum);
    }
}
