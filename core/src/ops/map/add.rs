//! Sums of tensors. NUMERICS.md, "Row-wise ops".

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, FLOAT, Values, distinct};
use crate::tensor::Tensor;

/// `out = a + b`, or `(a + b) + c`.
///
/// # Shape
/// Any; all alike. Types may differ.
#[derive(Clone, Copy, Debug)]
pub struct Add<'a> {
    /// First term.
    pub a: &'a Tensor,
    /// Second term.
    pub b: &'a Tensor,
    /// Third term.
    pub c: Option<&'a Tensor>,
    /// The sum, written.
    pub out: &'a Tensor,
}

op!(Add: read(a, b, c), write(out));

impl Add<'_> {
    pub(crate) const OP: &'static str = "add";

    pub(super) fn check(&self) -> Result<()> {
        Arg::new(Self::OP, "a", self.a).dtype(FLOAT)?;
        let mut inputs = vec![self.a, self.b];
        inputs.extend(self.c);
        for (field, tensor) in [("b", Some(self.b)), ("c", self.c), ("out", Some(self.out))] {
            if let Some(tensor) = tensor {
                Arg::new(Self::OP, field, tensor).dtype(FLOAT)?.len(self.a.len(), "as a")?;
            }
        }
        distinct(Self::OP, "out", self.out, &inputs)
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (a, b) = (Values::read(memory, self.a)?, Values::read(memory, self.b)?);
        let (c, mut out) = (Values::read_opt(memory, self.c)?, Values::read(memory, self.out)?);
        for i in 0..out.len() {
            let sum = a.float(i) + b.float(i);
            out.set_float(i, c.as_ref().map_or(sum, |c| sum + c.float(i)));
        }
        out.write(memory)
    }
}
