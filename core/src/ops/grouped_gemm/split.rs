//! f32 factors as sums of bf16 parts. NUMERICS.md, "Split operands".
//!
//! With round to nearest three bf16 parts hold the 24 bits of an f32. Their products are exact on a matrix unit, and the
//! short chains keep the unit's truncation small against f32's own rounding: DeepSeek-V3 promotes its FP8 products each 128
//! terms for the same reason (arXiv:2412.19437, section 3.3.2).

use crate::numerics::{NumericModel, bf16, mma};

/// Terms of a chain after which its part of a product is added to the result.
pub const SPLIT_BLOCK: usize = 128;

/// An f32 as bf16 parts.
///
/// # Numerics
/// high = bf16(x), middle = bf16(x - high), low = bf16(x - high - middle); both differences are exact. Their sum is x for
/// every |x| from 2^-110 to the largest bf16; below, low may round. Where high is not finite, middle and low are +0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// The bf16 code of what the others leave.
    pub low: u16,
    /// The bf16 code of what high leaves.
    pub middle: u16,
    /// The bf16 code nearest to x.
    pub high: u16,
}

impl Split {
    /// The parts of x.
    pub fn of(x: f32) -> Split {
        let high = bf16::from_f32(x);
        let rest = x - bf16::to_f32(high);
        if !bf16::to_f32(high).is_finite() {
            return Split { low: 0, middle: 0, high };
        }
        let middle = bf16::from_f32(rest);
        Split { low: bf16::from_f32(rest - bf16::to_f32(middle)), middle, high }
    }

    /// The smallest part first.
    pub fn parts(self) -> [u16; 3] {
        [self.low, self.middle, self.high]
    }

    /// The pairs of parts (counted as in [`Split::parts`]) that go into a product of two factors, in order; `split` says
    /// which factors are, and one that is not is its own part 0. Of two split factors, pairs whose product is below 2^-24 of
    /// the whole are left out.
    pub fn pairs(split: [bool; 2]) -> &'static [[usize; 2]] {
        match split {
            [false, false] => &[[0, 0]],
            [false, true] => &[[0, 0], [0, 1], [0, 2]],
            [true, false] => &[[0, 0], [1, 0], [2, 0]],
            [true, true] => &[[0, 2], [1, 1], [2, 0], [1, 2], [2, 1], [2, 2]],
        }
    }
}

/// One element of the output; each factor as its parts along the chain.
pub(super) fn dot(model: NumericModel, a: &[Vec<u16>], b: &[Vec<u16>]) -> f32 {
    let terms = a[0].len();
    (0..terms).step_by(SPLIT_BLOCK).fold(0.0, |acc, from| {
        let block = from..terms.min(from + SPLIT_BLOCK);
        let chain = |acc, &[x, y]: &[usize; 2]| mma::dot_bf16(model, &a[x][block.clone()], &b[y][block.clone()], acc);
        acc + Split::pairs([a, b].map(|parts| parts.len() > 1)).iter().fold(0.0, chain)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(split: Split) -> f64 {
        split.parts().iter().map(|&part| f64::from(bf16::to_f32(part))).sum()
    }

    #[test]
    fn the_parts_of_a_value_are_the_value() {
        let mut state = 1u32;
        for _ in 0..1 << 16 {
            state = state.wrapping_mul(0x0019_660D).wrapping_add(0x3C6E_F35F);
            // Every exponent from 2^-110 on to the one below the largest.
            let exponent = 17 + state % (254 - 17);
            let x = f32::from_bits(state & 0x807F_FFFF | exponent << 23);
            assert_eq!(value(Split::of(x)), f64::from(x), "{x:e}");
        }
        for x in [0.0, -0.0, 1.0, f32::MIN_POSITIVE, 3.389e38] {
            assert_eq!(value(Split::of(x)), f64::from(x), "{x:e}");
        }
    }

    #[test]
    fn what_is_not_finite_has_one_part() {
        for x in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX] {
            assert_eq!(Split::of(x), Split { low: 0, middle: 0, high: bf16::from_f32(x) });
        }
    }
}
