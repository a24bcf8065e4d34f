//! Rows moved by index, on tiles of rows.

use rayon::prelude::*;

use super::Simd;
use super::indices;
use super::tree::{Tree, sum_along};
use crate::error::{Error, Result};
use crate::host::memory::{self, Floats, FloatsMut, Input};
use crate::host::simd;
use crate::ops::{Combine, EmbeddingGrad, GatherRows, NONE};

pub(super) fn gather_rows(op: &GatherRows<'_>, simd: Simd) -> Result<()> {
    const OP: &str = GatherRows::OP;
    let (x, index) = (memory::input(OP, op.x)?, memory::input(OP, op.index)?);
    let mut out = memory::output(OP, op.out)?;
    let (index, cols) = (index.u32(), op.x.cols());
    indices::below(OP, "index", index, op.x.rows(), true)?;
    let tile = memory::min_rows(cols);
    if op.x.dtype() == op.out.dtype() {
        let (x, row) = (x.bytes(), cols * op.x.dtype().size());
        let rows = out.bytes().par_chunks_mut(row.max(1)).zip(index).with_min_len(tile);
        rows.filter(|(_, i)| **i != NONE)
            .for_each(|(out, &i)| out.copy_from_slice(&x[i as usize * row..(i as usize + 1) * row]));
    } else {
        let x = x.floats();
        (out.floats().pieces(tile * cols), index.par_chunks(tile)).into_par_iter().for_each(|(out, index)| {
            simd::with(
                simd,
                #[inline(always)]
                || convert_tile(x, cols, index, out),
            )
        });
    }
    Ok(())
}

/// Gathers rows of another float type.
#[inline(always)]
fn convert_tile(x: Floats<'_>, cols: usize, index: &[u32], out: FloatsMut<'_>) {
    let (mut out, mut x_row) = (out, Vec::new());
    for (i, &from) in index.iter().enumerate() {
        if from != NONE {
            out.store(i * cols, x.row(from as usize, cols, &mut x_row));
        }
    }
}

/// What a tile of [`Combine`] reads.
#[derive(Clone, Copy)]
struct Choices<'a> {
    op: &'a Combine<'a>,
    x: Floats<'a>,
    slots: &'a [u32],
    ids: Option<&'a [u32]>,
    add: [Option<Floats<'a>>; 2],
}

pub(super) fn combine(op: &Combine<'_>, simd: Simd) -> Result<()> {
    const OP: &str = Combine::OP;
    let (x, slots, ids) = (memory::input(OP, op.x)?, memory::input(OP, op.slots)?, memory::input_opt(OP, op.ids)?);
    let add = [memory::input_opt(OP, op.add[0])?, memory::input_opt(OP, op.add[1])?];
    let mut out = memory::output(OP, op.out)?;
    let choices = Choices {
        op,
        x: x.floats(),
        slots: slots.u32(),
        ids: ids.as_ref().map(Input::u32),
        add: add.each_ref().map(|add| add.as_ref().map(Input::floats)),
    };
    // The first fault in row order, whichever thread finds it.
    let counts = |row: &usize| op.window.is_none_or(|window| window.contains(*row));
    let rows = (0..op.out.rows()).into_par_iter().filter(counts);
    if let Some(fault) = rows.find_map_first(|row| choices.check(row).err()) {
        return Err(fault);
    }
    let (cols, tile) = (op.out.cols(), memory::min_rows(op.out.cols()));
    out.floats().pieces(tile * cols).into_par_iter().enumerate().for_each(|(t, out)| {
        simd::with(
            simd,
            #[inline(always)]
            || combine_tile(choices, t * tile, out),
        )
    });
    Ok(())
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

pub(super) fn embedding_grad(op: &EmbeddingGrad<'_>, simd: Simd) -> Result<()> {
    const OP: &str = EmbeddingGrad::OP;
    let (dy, ids) = (memory::input(OP, op.dy)?, memory::input(OP, op.ids)?);
    let mut d_table = memory::output(OP, op.d_table)?;
    let (dy, ids) = (dy.floats(), ids.u32());
    let (groups, vocabulary, cols) = (op.d_table.shape()[0], op.d_table.shape()[1], op.d_table.shape()[2]);
    indices::below(OP, "ids", ids, vocabulary, false)?;
    if ids.is_empty() || cols == 0 {
        return Ok(());
    }
    // Each thread owns a stretch of the vocabulary and looks through all tokens, so the order of the sums stays theirs.
    let tokens = ids.len() / groups;
    let stretch = vocabulary.div_ceil(2 * rayon::current_num_threads());
    let tables = d_table.f32().par_chunks_mut(vocabulary * cols).enumerate();
    tables.for_each(|(group, table)| {
        table.par_chunks_mut(stretch * cols).enumerate().for_each(|(s, table)| {
            simd::with(
                simd,
                #[inline(always)]
                || embedding_stretch(dy, ids, group * tokens..(group + 1) * tokens, s * stretch, table),
            );
        });
    });
    Ok(())
}

/// Adds the gradients of the ids from `first` on, as many as `table` has rows.
#[inline(always)]
fn embedding_stretch(dy: Floats<'_>, ids: &[u32], tokens: std::ops::Range<usize>, first: usize, table: &mut [f32]) {
    let cols = dy.len() / ids.len();
    let rows = first..first + table.len() / cols;
    for t in tokens {
        let id = ids[t] as usize;
        if rows.contains(&id) {
            dy.add_to(t * cols, &mut table[(id - first) * cols..(id - first + 1) * cols]);
        }
    }
}
