//! Sums over tokens, shards and parameters, each in one fixed order. NUMERICS.md, "Sums".

use crate::error::Result;
use crate::numerics::reduce;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, distinct, number};
use crate::tensor::Tensor;

/// Column sums of groups of equally many rows by the token-sum rule: blocks of 128 rows, each added in order from its
/// first row; the block sums added in order.
///
/// # Shape
/// x: `[rows, cols]`; out: f32 `[groups, cols]`, groups dividing rows. A group without rows is +0.
#[derive(Clone, Copy, Debug)]
pub struct SumRows<'a> {
    /// The rows.
    pub x: &'a Tensor,
    /// The sums, written.
    pub out: &'a Tensor,
}

op!(SumRows: read(x), write(out));

impl SumRows<'_> {
    pub(crate) const OP: &'static str = "sum_rows";

    pub(super) fn check(&self) -> Result<()> {
        Arg::new(Self::OP, "x", self.x).dtype(FLOAT)?;
        Arg::new(Self::OP, "out", self.out).dtype(&[DType::F32])?;
        let (rows, cols, groups) = (self.x.rows(), self.x.cols(), self.out.rows());
        number(
            Self::OP,
            "out",
            self.out.cols() == cols && groups > 0 && rows.is_multiple_of(groups),
            &format!("[groups, {cols}] with groups dividing {rows} rows"),
            format_args!("{:?}", self.out),
        )?;
        distinct(Self::OP, "out", self.out, &[self.x])
    }
}

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
}

/// `out` = the sum of the parts along a binary tree over their index (`tree(lo, hi)` of [`super::Combine`]).
///
/// # Shape
/// parts: f32 `[parts, ...]`; out: f32, as one part.
#[derive(Clone, Copy, Debug)]
pub struct TreeSum<'a> {
    /// The parts.
    pub parts: &'a Tensor,
    /// The sum, written.
    pub out: &'a Tensor,
}

op!(TreeSum: read(parts), write(out));

impl TreeSum<'_> {
    pub(crate) const OP: &'static str = "tree_sum";

    pub(super) fn check(&self) -> Result<()> {
        Arg::new(Self::OP, "parts", self.parts).dtype(&[DType::F32])?;
        let parts = self.parts.shape().first().copied().unwrap_or(0);
        number(Self::OP, "parts", parts > 0, "at least one part", parts)?;
        Arg::new(Self::OP, "out", self.out)
            .dtype(&[DType::F32])?
            .len(self.parts.len() / parts.max(1), "as one part")?;
        distinct(Self::OP, "out", self.out, &[self.parts])
    }
}
