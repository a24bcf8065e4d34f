//! The results of each token added along a tree, on tiles of rows.

use rayon::prelude::*;

use super::tree::{Tree, sum_along};
use super::{Fast, Simd};
use crate::error::{Error, Result};
use crate::host::memory::{self, Floats, FloatsMut, Input};
use crate::host::simd;
use crate::ops::{Combine, NONE};

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
        // The first fault in row order, whichever thread finds it.
        let counts = |row: &usize| self.window.is_none_or(|window| window.contains(*row));
        let rows = (0..self.out.rows()).into_par_iter().filter(counts);
        if let Some(fault) = rows.find_map_first(|row| choices.check(row).err()) {
            return Err(fault);
        }
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
    /// The leaves of a row that are there: id and slot.
    #[inline(always)]
    fn leaves(self, row: usize) -> impl Iterator<Item = (usize, usize)> {
        let k = self.op.slots.cols();
        (row * k..(row + 1) * k).filter(move |&at| self.slots[at] != NONE).map(move |at| {
            let id = self.ids.map_or(self.op.leaves.0 + at % k, |ids| ids[at] as usize);
            (id, self.slots[at] as usize)
        })
    }

    /// Every slot is a row of x, and the ids are distinct leaves.
    fn check(self, row: usize) -> Result<()> {
        let (slots, (lo, hi)) = (self.op.x.rows(), self.op.leaves);
        for (nth, (id, slot)) in self.leaves(row).enumerate() {
            let fault = |field, expected, found: usize| {
                Err(Error::Argument { op: Combine::OP, field, expected, found: format!("{found} in row {row}") })
            };
            if slot >= slots {
                return fault("slots", format!("indices below {slots} (or NONE)"), slot);
            }
            if !(lo..hi).contains(&id) || self.leaves(row).take(nth).any(|(other, _)| other == id) {
                return fault("ids", format!("distinct leaves within {lo}..{hi}"), id);
            }
        }
        Ok(())
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
