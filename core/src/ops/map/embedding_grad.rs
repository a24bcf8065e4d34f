//! The gradient of an embedding. NUMERICS.md, "Row-wise ops".

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, Values, distinct, number};
use crate::tensor::Tensor;

/// The gradient of an embedding: `d_table[g, ids[t], :] += dy[t, :]` for the tokens t of shard g, in order of t.
///
/// # Shape
/// dy: `[tokens, cols]`; ids: u32 `[tokens]`; d_table: f32 `[groups, vocabulary, cols]`, **added to**; groups divides
/// tokens. A token whose id lies outside the vocabulary adds nothing.
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

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (dy, ids) = (Values::read(memory, self.dy)?, Values::read(memory, self.ids)?);
        let mut d_table = Values::read(memory, self.d_table)?;
        let (groups, vocabulary, cols) = (self.d_table.shape()[0], self.d_table.shape()[1], self.dy.cols());
        for token in 0..ids.len() {
            let (group, id) = (token / (ids.len() / groups), ids.word(token) as usize);
            if id >= vocabulary {
                continue;
            }
            for col in 0..cols {
                let i = (group * vocabulary + id) * cols + col;
                d_table.set_float(i, d_table.float(i) + dy.float(token * cols + col));
            }
        }
        d_table.write(memory)
    }
}
