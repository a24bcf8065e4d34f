//! Column sums by the token-sum rule. NUMERICS.md, "Sums".

use crate::backend::Backend;
use crate::error::Result;
use crate::numerics::reduce;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, Values, distinct, number};
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

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (x, mut out) = (Values::read(memory, self.x)?, Values::read(memory, self.out)?);
        let (cols, groups) = (self.x.cols(), self.out.rows());
        let rows = self.x.rows() / groups;
        for group in 0..groups {
            for col in 0..cols {
                let sum = reduce::tokens(rows, |r| x.float((group * rows + r) * cols + col));
                out.set_float(group * cols + col, sum);
            }
        }
        out.write(memory)
    }
}
