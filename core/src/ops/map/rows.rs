//! Rows moved by index: gather, combine, and the gradient of an embedding.

use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, Window, distinct, number};
use crate::tensor::Tensor;

/// `out[i, :] = x[index[i], :]`; where the index is [`crate::ops::NONE`], the row of `out` stays as it is.
///
/// # Shape
/// x: `[rows, cols]`; index: u32, one for each row of out; out: `[.., cols]`. f32 and bf16 may mix (nearest even); u32
/// goes to u32.
#[derive(Clone, Copy, Debug)]
pub struct GatherRows<'a> {
    /// The source.
    pub x: &'a Tensor,
    /// Source row of each row.
    pub index: &'a Tensor,
    /// The rows, written.
    pub out: &'a Tensor,
}

op!(GatherRows: read(x, index), write(out));

impl GatherRows<'_> {
    pub(crate) const OP: &'static str = "gather_rows";

    pub(super) fn check(&self) -> Result<()> {
        let cols = self.x.cols();
        let integers = self.x.dtype() == DType::U32;
        let types = if integers { &[DType::U32][..] } else { FLOAT };
        Arg::new(Self::OP, "x", self.x).dtype(types)?;
        Arg::new(Self::OP, "out", self.out).dtype(types)?;
        number(Self::OP, "out", self.out.cols() == cols, &format!("{cols} columns as x"), self.out.cols())?;
        Arg::new(Self::OP, "index", self.index)
            .dtype(&[DType::U32])?
            .len(self.out.rows(), "one for each row of out")?;
        distinct(Self::OP, "out", self.out, &[self.x, self.index])
    }
}

/// Adds the results that belong to one token along the fixed binary tree over `leaves` (experts, or ranks).
///
/// # Shape
/// x: `[slots, cols]`; slots: u32 `[rows, k]`, [`crate::ops::NONE`] for an absent one; ids: u32 `[rows, k]`, the leaf of
/// each (distinct within a row; absent ones are ignored) — the column itself if not given; add: up to two further
/// terms `[rows, cols]`; out: `[rows, cols]`. Types may differ.
///
/// # Numerics
/// `tree(lo, hi) = tree(lo, mid) + tree(mid, hi)` with `mid = lo + (hi - lo) / 2`, absent leaves skipped (not added as
/// zeros), in f32. A row without any leaf is +0. Then `+ add[0]`, then `+ add[1]`, then one rounding.
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
}

/// The gradient of an embedding: `d_table[g, ids[t], :] += dy[t, :]` for the tokens t of shard g, in order of t.
///
/// # Shape
/// dy: `[tokens, cols]`; ids: u32 `[tokens]`; d_table: f32 `[groups, vocabulary, cols]`, **added to**; groups divides
/// tokens. Ids outside the vocabulary do not occur (the data loader checks them).
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingGrad<'a> {
    /// Gradient of the embedded rows.
    pub dy: &'a Tensor,
    /// Token ids.
    pub ids: &'a Tensor,
    /// Gradient of the table, added to.
    pub d_table: &'a Tensor,
}

op!(EmbeddingGrad: read(dy, ids), update(d_table));

impl EmbeddingGrad<'_> {
    pub(crate) const OP: &'static str = "embedding_grad";

    pub(super) fn check(&self) -> Result<()> {
        let (tokens, cols) = (self.dy.rows(), self.dy.cols());
        Arg::new(Self::OP, "dy", self.dy).dtype(FLOAT)?;
        Arg::new(Self::OP, "ids", self.ids).dtype(&[DType::U32])?.len(tokens, "one for each token")?;
        Arg::new(Self::OP, "d_table", self.d_table).dtype(&[DType::F32])?;
        let shape = self.d_table.shape();
        number(
            Self::OP,
            "d_table",
            shape.len() == 3 && shape[2] == cols && shape[0] > 0 && tokens.is_multiple_of(shape[0]),
            &format!("[groups, vocabulary, {cols}] with groups dividing {tokens} tokens"),
            format_args!("{:?}", self.d_table),
        )?;
        distinct(Self::OP, "d_table", self.d_table, &[self.dy, self.ids])
    }
}
