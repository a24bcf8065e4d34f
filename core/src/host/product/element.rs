//! The element types of a product's factors, as the kernels take them: values, and exponents for a matrix unit.

use crate::numerics::mma::Tensorcore;
use crate::numerics::{bf16, e4m3};

/// The exponent of a zero: below every other sum, whatever it is added to.
const ZERO: i16 = -10_000;
/// The exponent of NaN and infinity: above every other sum.
const SPECIAL: i16 = 20_000;

/// An element type of the factors.
pub(super) trait Element: Copy + Default + 'static {
    fn value(self) -> f32;
    /// The exponent, not normalised, for a matrix unit: [`ZERO`] and [`SPECIAL`] for what has none.
    fn exponent(self) -> i16;
    /// One step as the specification has it.
    fn step(unit: Tensorcore, a: &[Self], b: &[Self], acc: f32) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }

    fn exponent(self) -> i16 {
        unreachable!("no matrix unit here multiplies f32")
    }

    fn step(_unit: Tensorcore, _a: &[f32], _b: &[f32], _acc: f32) -> f32 {
        unreachable!("no matrix unit here multiplies f32")
    }
}

impl Element for u16 {
    #[inline(always)]
    fn value(self) -> f32 {
        bf16::to_f32(self)
    }

    #[inline(always)]
    fn exponent(self) -> i16 {
        let magnitude = (self & 0x7FFF).cast_signed();
        let exponent = (magnitude >> 7).max(1) - 127;
        let exponent = if magnitude >= 0x7F80 { SPECIAL } else { exponent };
        if magnitude == 0 { ZERO } else { exponent }
    }

    fn step(unit: Tensorcore, a: &[u16], b: &[u16], acc: f32) -> f32 {
        unit.add_bf16(a, b, acc)
    }
}

impl Element for u8 {
    #[inline(always)]
    fn value(self) -> f32 {
        e4m3::to_f32(self)
    }

    #[inline(always)]
    fn exponent(self) -> i16 {
        let magnitude = i16::from(self & 0x7F);
        let exponent = (magnitude >> 3).max(1) - 7;
        let exponent = if magnitude == 0x7F { SPECIAL } else { exponent };
        if magnitude == 0 { ZERO } else { exponent }
    }

    fn step(unit: Tensorcore, a: &[u8], b: &[u8], acc: f32) -> f32 {
        unit.add_e4m3(a, b, acc)
    }
}
