//! Rows taken by index. NUMERICS.md, "Row-wise ops".

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, Values, distinct, number};
use crate::tensor::Tensor;

/// `out[i, :] = x[index[i], :]`; where the index names no row of x ([`crate::ops::NONE`]), the row of `out` stays as it is.
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

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (x, index) = (Values::read(memory, self.x)?, Values::read(memory, self.index)?);
        let mut out = Values::read(memory, self.out)?;
        for r in 0..index.len() {
            let from = index.word(r) as usize;
            if from >= self.x.rows() {
                continue;
            }
            if self.x.dtype() == self.out.dtype() {
                let row = x.row_bytes(from);
                out.bytes_mut()[r * row.len()..(r + 1) * row.len()].copy_from_slice(row);
            } else {
                out.set_row(r, &x.row(from));
            }
        }
        out.write(memory)
    }
}
