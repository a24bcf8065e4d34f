//! Conversion between float types. NUMERICS.md, "Row-wise ops".

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, FLOAT, Values, distinct};
use crate::tensor::Tensor;

/// `out = x` in another float type (nearest even).
///
/// # Shape
/// Any; both alike.
#[derive(Clone, Copy, Debug)]
pub struct Cast<'a> {
    /// The source.
    pub x: &'a Tensor,
    /// The destination, written.
    pub out: &'a Tensor,
}

op!(Cast: read(x), write(out));

impl Cast<'_> {
    pub(crate) const OP: &'static str = "cast";

    pub(super) fn check(&self) -> Result<()> {
        Arg::new(Self::OP, "x", self.x).dtype(FLOAT)?;
        Arg::new(Self::OP, "out", self.out).dtype(FLOAT)?.len(self.x.len(), "as x")?;
        distinct(Self::OP, "out", self.out, &[self.x])
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (x, mut out) = (Values::read(memory, self.x)?, Values::read(memory, self.out)?);
        for i in 0..out.len() {
            out.set_float(i, x.float(i));
        }
        out.write(memory)
    }
}
