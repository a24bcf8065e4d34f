//! One value for every element.

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{FLOAT, Values, number};
use crate::tensor::Tensor;

/// `out[..] = value`. A value of 0 also clears integer tensors.
#[derive(Clone, Copy, Debug)]
pub struct Fill<'a> {
    /// The tensor, written.
    pub out: &'a Tensor,
    /// The value.
    pub value: f32,
}

op!(Fill: write(out), value(value));

impl Fill<'_> {
    pub(crate) const OP: &'static str = "fill";

    pub(super) fn check(&self) -> Result<()> {
        let float = FLOAT.contains(&self.out.dtype());
        number(
            Self::OP,
            "value",
            float || self.value.to_bits() == 0,
            "0 for a tensor that is not f32 or bf16",
            self.value,
        )
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let mut out = Values::read(memory, self.out)?;
        if FLOAT.contains(&self.out.dtype()) {
            (0..out.len()).for_each(|i| out.set_float(i, self.value));
        } else {
            out.bytes_mut().fill(0);
        }
        out.write(memory)
    }
}
