//! The gradient norm and the factor that clips it. NUMERICS.md, "Optimizer".

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, Values, distinct, number};
use crate::tensor::Tensor;

/// The global gradient norm and the factor that clips it.
///
/// # Shape
/// squares: f32, sums of squares in a fixed order; out: f32 `[2]`: norm, factor.
///
/// # Numerics
/// norm = sqrt(squares added in order); factor = `max_norm / norm` if norm > max_norm, else 1. A NaN norm gives a NaN
/// factor; `max_norm` 0 never clips.
#[derive(Clone, Copy, Debug)]
pub struct ClipScale<'a> {
    /// Sums of squares.
    pub squares: &'a Tensor,
    /// The largest norm that is left alone; 0 for no clipping.
    pub max_norm: f32,
    /// Norm and factor, written.
    pub out: &'a Tensor,
}

op!(ClipScale: read(squares), write(out), value(max_norm));

impl ClipScale<'_> {
    pub(crate) const OP: &'static str = "clip_scale";

    pub(super) fn check(&self) -> Result<()> {
        Arg::new(Self::OP, "squares", self.squares).dtype(&[DType::F32])?;
        number(Self::OP, "max_norm", self.max_norm >= 0.0, "0 or more", self.max_norm)?;
        Arg::new(Self::OP, "out", self.out).dtype(&[DType::F32])?.len(2, "norm and factor")?;
        distinct(Self::OP, "out", self.out, &[self.squares])
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (squares, mut out) = (Values::read(memory, self.squares)?, Values::read(memory, self.out)?);
        let norm = squares.floats().into_iter().fold(0.0f32, |sum, square| sum + square).sqrt();
        let factor = if norm.is_nan() {
            norm
        } else if self.max_norm > 0.0 && norm > self.max_norm {
            self.max_norm / norm
        } else {
            1.0
        };
        out.set_row(0, &[norm, factor]);
        out.write(memory)
    }
}
