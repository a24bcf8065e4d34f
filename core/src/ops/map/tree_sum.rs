//! Sums of parts along a binary tree. NUMERICS.md, "Sums".

use crate::backend::Backend;
use crate::error::Result;
use crate::numerics::reduce;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, Values, distinct, number};
use crate::tensor::Tensor;

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

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (parts, mut out) = (Values::read(memory, self.parts)?, Values::read(memory, self.out)?);
        let (count, len) = (self.parts.shape()[0], out.len());
        for i in 0..len {
            let sum = reduce::tree(0, count, &|part| Some(parts.float(part * len + i)));
            out.set_float(i, sum.unwrap_or(0.0));
        }
        out.write(memory)
    }
}
