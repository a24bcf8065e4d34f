//! The results of one token added along a binary tree. NUMERICS.md, "Sums" and "Row-wise ops".

use crate::backend::Backend;
use crate::error::Result;
use crate::numerics::reduce;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, Values, Window, distinct, number};
use crate::tensor::Tensor;

/// Adds the results that belong to one token along the fixed binary tree over `leaves` (experts, or ranks).
///
/// # Shape
/// x: `[slots, cols]`; slots: u32 `[rows, k]`, none of x's rows ([`crate::ops::NONE`]) for an absent one; ids: u32
/// `[rows, k]`, the leaf of each, absent where it is none of `leaves` — the column itself if not given; add: up to two
/// further terms `[rows, cols]`; out: `[rows, cols]`. Types may differ.
///
/// # Numerics
/// `tree(lo, hi) = tree(lo, mid) + tree(mid, hi)` with `mid = lo + (hi - lo) / 2`, absent leaves skipped (not added as
/// zeros), in f32. Results of one leaf, if it has several, are added in the order of their columns. A row without any leaf
/// is +0. Then `+ add[0]`, then `+ add[1]`, then one rounding.
#[derive(Clone, Copy, Debug)]
pub struct Combine<'a> {
    /// The results.
    pub x: &'a Tensor,
    /// Where each row's results are.
    pub slots: &'a Tensor,
    /// Which leaf each result is.
    pub ids: Option<&'a Tensor>,
    /// Leaves lo..hi of the tree: all experts, the experts of one rank, or the ranks.
    pub leaves: (usize, usize),
    /// Only these rows; the others stay as they are.
    pub window: Option<Window>,
    /// Terms added after the tree.
    pub add: [Option<&'a Tensor>; 2],
    /// The sums, written.
    pub out: &'a Tensor,
}

op!(Combine: read(x, slots, ids, add), write(out), value(leaves, window));

impl Combine<'_> {
    pub(crate) const OP: &'static str = "combine";

    pub(super) fn check(&self) -> Result<()> {
        let (rows, cols, k) = (self.out.rows(), self.out.cols(), self.slots.cols());
        Arg::new(Self::OP, "x", self.x).dtype(FLOAT)?;
        Arg::new(Self::OP, "out", self.out).dtype(FLOAT)?;
        number(Self::OP, "x", self.x.cols() == cols, &format!("{cols} columns as out"), self.x.cols())?;
        Arg::new(Self::OP, "slots", self.slots).dtype(&[DType::U32])?.len(rows * k, "[rows, k]")?;
        let (lo, hi) = self.leaves;
        number(Self::OP, "leaves", lo < hi, "at least one leaf", format_args!("{lo}..{hi}"))?;
        if let Some(window) = self.window {
            window.check(Self::OP, rows)?;
        }
        let mut inputs = vec![self.x, self.slots];
        if let Some(ids) = self.ids {
            Arg::new(Self::OP, "ids", ids).dtype(&[DType::U32])?.len(rows * k, "as slots")?;
            inputs.push(ids);
        } else {
            number(Self::OP, "leaves", hi - lo == k, &format!("{k} leaves, one for each column"), hi - lo)?;
        }
        for add in self.add.iter().flatten() {
            Arg::new(Self::OP, "add", add).dtype(FLOAT)?.len(rows * cols, "as out")?;
            inputs.push(add);
        }
        distinct(Self::OP, "out", self.out, &inputs)
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (x, slots, ids) =
            (Values::read(memory, self.x)?, Values::read(memory, self.slots)?, Values::read_opt(memory, self.ids)?);
        let add = [Values::read_opt(memory, self.add[0])?, Values::read_opt(memory, self.add[1])?];
        let mut out = Values::read(memory, self.out)?;
        let ((lo, hi), k, cols) = (self.leaves, self.slots.cols(), self.out.cols());
        for row in (0..self.out.rows()).filter(|&row| self.window.is_none_or(|window| window.contains(row))) {
            for col in 0..cols {
                // The results of one leaf, of which there is at most one if its ids are distinct.
                let leaf = |leaf: usize| {
                    let choices = (0..k).filter(|i| {
                        let id = ids.as_ref().map_or(lo + i, |ids| ids.word(row * k + i) as usize);
                        id == leaf && (slots.word(row * k + i) as usize) < self.x.rows()
                    });
                    choices.map(|i| x.float(slots.word(row * k + i) as usize * cols + col)).reduce(|sum, x| sum + x)
                };
                let sum = reduce::tree(lo, hi, &leaf).unwrap_or(0.0);
                let terms = add.iter().flatten().map(|add| add.float(row * cols + col));
                out.set_float(row * cols + col, terms.fold(sum, |sum, term| sum + term));
            }
        }
        out.write(memory)
    }
}
