//! Sums of squares of rows. NUMERICS.md, "Sums".

use crate::backend::Backend;
use crate::error::Result;
use crate::numerics::reduce;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, Values, distinct};
use crate::tensor::Tensor;

/// `out[r]` = row reduction of `x[r, :]^2`.
///
/// # Shape
/// x: `[rows, cols]`; out: f32 `[rows]`.
#[derive(Clone, Copy, Debug)]
pub struct SumSquares<'a> {
    /// The rows.
    pub x: &'a Tensor,
    /// The sums, written.
    pub out: &'a Tensor,
}

op!(SumSquares: read(x), write(out));

impl SumSquares<'_> {
    pub(crate) const OP: &'static str = "sum_squares";

    pub(super) fn check(&self) -> Result<()> {
        Arg::new(Self::OP, "x", self.x).dtype(FLOAT)?;
        Arg::new(Self::OP, "out", self.out).dtype(&[DType::F32])?.len(self.x.rows(), "one for each row")?;
        distinct(Self::OP, "out", self.out, &[self.x])
    }

    /// One row.
    #[inline(always)]
    pub fn row(x: &[f32]) -> f32 {
        reduce::row(x.len(), |i| x[i] * x[i])
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (x, mut out) = (Values::read(memory, self.x)?, Values::read(memory, self.out)?);
        for r in 0..self.x.rows() {
            out.set_float(r, SumSquares::row(&x.row(r)));
        }
        out.write(memory)
    }
}
