//! One step of a matrix unit, in integers: the specification of matrix products. NUMERICS.md, "Matrix products".
//!
//! A chain adds `step` products at a time to an f32 accumulator. Within a step nothing is rounded to nearest: every
//! term is truncated to the grid of the largest one, the sum is exact, and the result is truncated to f32 again. The host
//! backend's fast products and the shaders compute the same bits by other means and are tested against this file.

use super::{NumericModel, bf16, e4m3};

/// What the hardware answers.
const NAN: u32 = 0x7FFF_FFFF;

/// The constants of a matrix unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensorcore {
    /// Products added in one step.
    pub step: usize,
    /// Bits kept below the exponent of the largest term.
    pub fraction_bits: i32,
    /// Fraction bits of the f32 result.
    pub result_bits: i32,
}

impl Tensorcore {
    /// `wgmma` with bf16 operands, measured on an H200.
    pub const HOPPER_BF16: Tensorcore = Tensorcore { step: 16, fraction_bits: 25, result_bits: 23 };
    /// `wgmma` with e4m3 operands, measured on an H200.
    pub const HOPPER_E4M3: Tensorcore = Tensorcore { step: 32, fraction_bits: 13, result_bits: 13 };
    /// bf16 operands, as published by others; unverified.
    pub const BLACKWELL_BF16: Tensorcore = Tensorcore { step: 16, fraction_bits: 25, result_bits: 23 };
    /// e4m3 operands with or without block scales, as published by others; unverified.
    pub const BLACKWELL_E4M3: Tensorcore = Tensorcore { step: 32, fraction_bits: 25, result_bits: 23 };

    /// The unit that multiplies bf16 operands under `model`; None for plain f32 arithmetic.
    pub const fn of_bf16(model: NumericModel) -> Option<Tensorcore> {
        match model {
            NumericModel::F32 => None,
            NumericModel::Hopper => Some(Self::HOPPER_BF16),
            NumericModel::Blackwell => Some(Self::BLACKWELL_BF16),
        }
    }

    /// The unit that multiplies e4m3 operands under `model`; None for plain f32 arithmetic.
    pub const fn of_e4m3(model: NumericModel) -> Option<Tensorcore> {
        match model {
            NumericModel::F32 => None,
            NumericModel::Hopper => Some(Self::HOPPER_E4M3),
            NumericModel::Blackwell => Some(Self::BLACKWELL_E4M3),
        }
    }

    /// `acc` plus the products of bf16 codes, as one step.
    pub fn add_bf16(&self, a: &[u16], b: &[u16], acc: f32) -> f32 {
        self.add(a.iter().zip(b).map(|(&a, &b)| Term::bf16(a).times(Term::bf16(b))), acc)
    }

    /// `acc` plus the products of e4m3 codes, as one step.
    pub fn add_e4m3(&self, a: &[u8], b: &[u8], acc: f32) -> f32 {
        self.add(a.iter().zip(b).map(|(&a, &b)| Term::e4m3(a).times(Term::e4m3(b))), acc)
    }

    /// `acc` plus the products of e4m3 codes whose blocks have the ue8m0 scales `scales`, as one step.
    fn add_mxfp8(&self, a: &[u8], b: &[u8], scales: [u8; 2], acc: f32) -> f32 {
        if scales.contains(&0xFF) {
            return f32::from_bits(NAN);
        }
        let exponent = i32::from(scales[0]) - 127 + i32::from(scales[1]) - 127;
        self.add(a.iter().zip(b).map(|(&a, &b)| Term::e4m3(a).times(Term::e4m3(b)).scaled(exponent)), acc)
    }

    /// The rule itself.
    fn add(&self, products: impl Iterator<Item = Term> + Clone, acc: f32) -> f32 {
        let terms = products.chain(std::iter::once(Term::f32(acc)));
        let any = |wanted: Term| terms.clone().any(|term| term == wanted);
        let (positive, negative) = (any(Term::Infinite { negative: false }), any(Term::Infinite { negative: true }));
        if any(Term::Nan) || (positive && negative) {
            return f32::from_bits(NAN);
        }
        if positive || negative {
            return if negative { f32::NEG_INFINITY } else { f32::INFINITY };
        }

        let finite = terms.filter_map(|term| match term {
            Term::Finite(value) if value.significand != 0 => Some(value),
            _ => None,
        });
        let Some(largest) = finite.clone().map(|value| value.exponent).max() else { return 0.0 };
        let grid = largest - self.fraction_bits;
        self.truncate(finite.map(|value| value.on_grid(grid)).sum(), grid)
    }

    /// `total * 2^grid` as f32, truncated toward zero to `result_bits` fraction bits; zero is +0.
    fn truncate(&self, total: i64, grid: i32) -> f32 {
        let magnitude = total.unsigned_abs();
        let Some(top) = magnitude.checked_ilog2() else { return 0.0 };
        let sign = if total < 0 { 1 << 31 } else { 0 };
        let exponent = top.cast_signed() + grid;
        if exponent > 127 {
            return f32::from_bits(sign | 0x7F80_0000);
        }
        // The exponent of the last bit kept; it stops falling at the subnormals.
        let last = exponent.max(-126) - self.result_bits;
        let fraction = shift(magnitude, grid - last) << (23 - self.result_bits);
        let fraction = u32::try_from(fraction).expect("a cut magnitude has at most 24 bits");
        let field = if exponent < -126 { 0 } else { (exponent + 127).cast_unsigned() };
        f32::from_bits(sign | field << 23 | fraction & 0x7F_FFFF)
    }
}

/// `magnitude * 2^by`, truncated toward zero.
fn shift(magnitude: u64, by: i32) -> u64 {
    if by >= 0 { magnitude << by } else { magnitude.checked_shr(by.unsigned_abs()).unwrap_or(0) }
}

/// `significand * 2^(exponent - fraction)`, not normalised: subnormals keep the format's least exponent, and a
/// product has the sum of its factors' exponents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Value {
    negative: bool,
    significand: u64,
    exponent: i32,
    fraction: i32,
}

impl Value {
    /// In units of `2^grid`, truncated toward zero.
    fn on_grid(self, grid: i32) -> i64 {
        let magnitude = shift(self.significand, self.exponent - self.fraction - grid).cast_signed();
        if self.negative { -magnitude } else { magnitude }
    }
}

/// A factor, a product or the accumulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Term {
    Finite(Value),
    Infinite { negative: bool },
    Nan,
}

impl Term {
    fn bf16(code: u16) -> Term {
        let wide = u32::from(code);
        Term::ieee(wide >> 15 == 1, wide >> 7 & 0xFF, wide & 0x7F, 7)
    }

    fn f32(x: f32) -> Term {
        let bits = x.to_bits();
        Term::ieee(bits >> 31 == 1, bits >> 23 & 0xFF, bits & 0x7F_FFFF, 23)
    }

    fn e4m3(code: u8) -> Term {
        let (negative, field, significand) = (code >> 7 == 1, i32::from(code >> 3 & 15), u64::from(code & 7));
        if code & 0x7F == 0x7F {
            return Term::Nan;
        }
        let hidden = if field > 0 { 8 } else { 0 };
        Term::Finite(Value { negative, significand: significand | hidden, exponent: field.max(1) - 7, fraction: 3 })
    }

    /// A format with an 8-bit exponent field and infinities.
    fn ieee(negative: bool, field: u32, significand: u32, fraction: i32) -> Term {
        match (field, significand) {
            (255, 0) => Term::Infinite { negative },
            (255, _) => Term::Nan,
            _ => {
                let hidden = u64::from(field > 0) << fraction;
                let exponent = field.max(1).cast_signed() - 127;
                Term::Finite(Value { negative, significand: u64::from(significand) | hidden, exponent, fraction })
            }
        }
    }

    fn times(self, other: Term) -> Term {
        match (self, other) {
            (Term::Finite(a), Term::Finite(b)) => Term::Finite(Value {
                negative: a.negative != b.negative,
                significand: a.significand * b.significand,
                exponent: a.exponent + b.exponent,
                fraction: a.fraction + b.fraction,
            }),
            (Term::Infinite { negative }, Term::Finite(value)) | (Term::Finite(value), Term::Infinite { negative })
                if value.significand != 0 =>
            {
                Term::Infinite { negative: negative != value.negative }
            }
            (Term::Infinite { negative: a }, Term::Infinite { negative: b }) => Term::Infinite { negative: a != b },
            _ => Term::Nan,
        }
    }

    fn scaled(self, by: i32) -> Term {
        match self {
            Term::Finite(value) => Term::Finite(Value { exponent: value.exponent + by, ..value }),
            special => special,
        }
    }
}

/// One step of 16 bf16 products.
pub fn step_bf16(model: NumericModel, a: &[u16; 16], b: &[u16; 16], acc: f32) -> f32 {
    dot_bf16(model, a, b, acc)
}

/// One step of 32 e4m3 products.
pub fn step_e4m3(model: NumericModel, a: &[u8; 32], b: &[u8; 32], acc: f32) -> f32 {
    dot_e4m3(model, a, b, acc)
}

/// One step of 32 e4m3 products on Blackwell, where the blocks' ue8m0 scales add to the exponents inside the sum.
/// Unverified.
pub fn step_mxfp8(a: &[u8; 32], scale_a: u8, b: &[u8; 32], scale_b: u8, acc: f32) -> f32 {
    dot_mxfp8(a, &[scale_a], b, &[scale_b], acc)
}

/// The chain `acc + a[0] b[0] + a[1] b[1] + ...` of bf16 codes. A last step may be short: zeros change nothing.
pub fn dot_bf16(model: NumericModel, a: &[u16], b: &[u16], acc: f32) -> f32 {
    match Tensorcore::of_bf16(model) {
        Some(core) => chain(core.step, a, b, acc, |a, b, acc| core.add_bf16(a, b, acc)),
        None => a.iter().zip(b).fold(acc, |acc, (&a, &b)| bf16::to_f32(a).mul_add(bf16::to_f32(b), acc)),
    }
}

/// The chain of e4m3 codes; see [`dot_bf16`].
pub fn dot_e4m3(model: NumericModel, a: &[u8], b: &[u8], acc: f32) -> f32 {
    match Tensorcore::of_e4m3(model) {
        Some(core) => chain(core.step, a, b, acc, |a, b, acc| core.add_e4m3(a, b, acc)),
        None => a.iter().zip(b).fold(acc, |acc, (&a, &b)| e4m3::to_f32(a).mul_add(e4m3::to_f32(b), acc)),
    }
}

/// The chain of MXFP8 codes on Blackwell, with one scale for each 32 elements. Unverified.
pub fn dot_mxfp8(a: &[u8], scales_a: &[u8], b: &[u8], scales_b: &[u8], acc: f32) -> f32 {
    let core = Tensorcore::BLACKWELL_E4M3;
    let blocks = a.chunks(core.step).zip(scales_a).zip(b.chunks(core.step).zip(scales_b));
    blocks.fold(acc, |acc, ((a, &scale_a), (b, &scale_b))| core.add_mxfp8(a, b, [scale_a, scale_b], acc))
}

/// The chain of f32 values, a fused multiply-add each, whatever the model.
pub fn dot_f32(a: &[f32], b: &[f32], acc: f32) -> f32 {
    a.iter().zip(b).fold(acc, |acc, (&a, &b)| a.mul_add(b, acc))
}

fn chain<T>(step: usize, a: &[T], b: &[T], acc: f32, add: impl Fn(&[T], &[T], f32) -> f32) -> f32 {
    a.chunks(step).zip(b.chunks(step)).fold(acc, |acc, (a, b)| add(a, b, acc))
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    const RECORDED: &[u8] = include_bytes!("../../../tests/data/hopper_wgmma.safetensors");
    /// Chains of 4 steps over tiles of 64 rows and 8 columns.
    const TILES: usize = 104;
    const STEPS: usize = 4;
    const ROWS: usize = 64;
    const COLS: usize = 8;

    fn codes<T: bytemuck::AnyBitPattern>(name: &str) -> Vec<T> {
        let file = SafeTensors::deserialize(RECORDED).unwrap();
        let bytes = file.tensor(name).unwrap().data();
        bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    /// Outputs where `add` differs from what the card computed.
    fn mismatches<T: bytemuck::AnyBitPattern>(kind: &str, step: usize, add: impl Fn(&[T], &[T], f32) -> f32) -> usize {
        let [a, b] = ["a", "b"].map(|name| codes::<T>(&format!("{kind}.{name}")));
        let [c, d] = ["c", "d"].map(|name| codes::<f32>(&format!("{kind}.{name}")));
        assert_eq!(a.len(), TILES * STEPS * ROWS * step);
        assert_eq!(c.len(), TILES * ROWS * COLS);
        let mut wrong = 0;
        for (out, (&start, &want)) in c.iter().zip(&d).enumerate() {
            let (tile, row, col) = (out / (ROWS * COLS), out / COLS % ROWS, out % COLS);
            let got = (0..STEPS).fold(start, |acc, s| {
                let a = &a[((tile * STEPS + s) * ROWS + row) * step..][..step];
                let b = &b[((tile * STEPS + s) * COLS + col) * step..][..step];
                add(a, b, acc)
            });
            wrong += usize::from(!same(got, want));
        }
        wrong
    }

    fn bf16_mismatches(core: Tensorcore) -> usize {
        mismatches("bf16", 16, |a, b, acc| core.add_bf16(a, b, acc))
    }

    fn e4m3_mismatches(core: Tensorcore) -> usize {
        mismatches("e4m3", 32, |a, b, acc| core.add_e4m3(a, b, acc))
    }

    #[test]
    fn the_recorded_outputs_of_an_h200_are_reproduced() {
        let model = NumericModel::Hopper;
        assert_eq!(
            mismatches("bf16", 16, |a, b, acc| step_bf16(model, a.try_into().unwrap(), b.try_into().unwrap(), acc)),
            0
        );
        assert_eq!(
            mismatches("e4m3", 32, |a, b, acc| step_e4m3(model, a.try_into().unwrap(), b.try_into().unwrap(), acc)),
            0
        );
    }

    /// The control: each constant matters, so the recorded data can tell a wrong model.
    #[test]
    fn no_other_constant_reproduces_them() {
        for by in [-1, 1] {
            let (bf16, e4m3) = (Tensorcore::HOPPER_BF16, Tensorcore::HOPPER_E4M3);
            assert_ne!(bf16_mismatches(Tensorcore { fraction_bits: bf16.fraction_bits + by, ..bf16 }), 0);
            assert_ne!(e4m3_mismatches(Tensorcore { fraction_bits: e4m3.fraction_bits + by, ..e4m3 }), 0);
            assert_ne!(e4m3_mismatches(Tensorcore { result_bits: e4m3.result_bits + by, ..e4m3 }), 0);
        }
        let bf16 = Tensorcore::HOPPER_BF16;
        assert_ne!(bf16_mismatches(Tensorcore { result_bits: bf16.result_bits - 1, ..bf16 }), 0);
    }

    #[test]
    fn zeros_are_an_identity() {
        for acc in [1.5f32, -3.0e-39, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NAN] {
            assert!(same(step_bf16(NumericModel::Hopper, &[0; 16], &[0x3F80; 16], acc), acc));
            assert!(same(step_e4m3(NumericModel::Blackwell, &[0x80; 32], &[0x38; 32], acc), acc));
        }
        assert_eq!(step_bf16(NumericModel::Hopper, &[0x8000; 16], &[0x3F80; 16], -0.0).to_bits(), 0);
    }

    #[test]
    fn block_scales_are_exponents_inside_the_sum() {
        let ones = [0x38; 32];
        assert_eq!(step_mxfp8(&ones, 127, &ones, 127, 1.0), 33.0);
        assert_eq!(step_mxfp8(&ones, 130, &ones, 125, 1.0), 65.0);
        // 2^-254 is no f32, but the grid does not care.
        assert_eq!(step_mxfp8(&ones, 254, &ones, 0, 0.0), 32.0);
        assert!(step_mxfp8(&ones, 255, &[0; 32], 127, 0.0).is_nan());
    }
}
