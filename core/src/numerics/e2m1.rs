//! e2m1: 1 sign, 2 exponent bits and 1 fraction bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Codes are 4 bits
//! wide. NUMERICS.md, "Number formats".

/// The largest value.
pub const MAX: f32 = 6.0;

/// The exponent field that the smallest normal value has in f32, in place.
const LEAST: u32 = 127 << 23;

/// The value of the low 4 bits of `code`, exactly.
#[inline(always)]
pub const fn to_f32(code: u8) -> f32 {
    let magnitude = (code & 7) as u32;
    let sign = ((code & 8) as u32) << 28;
    // The bits moved to their place in f32, where the bias is 126 larger; subnormals included.
    let value = f32::from_bits(magnitude << 22) * f32::from_bits((127 + 126) << 23);
    f32::from_bits(value.to_bits() | sign)
}

/// The code nearest to x, ties to even; beyond 6, infinity included, 6 with the sign of x; NaN, for which there is no
/// code, gives +6.
#[inline(always)]
pub const fn from_f32(x: f32) -> u8 {
    let magnitude = x.to_bits() & 0x7FFF_FFFF;
    let sign = (x.to_bits() >> 28) as u8 & 8;
    let capped = if magnitude > MAX.to_bits() { MAX.to_bits() } else { magnitude };
    // Adding a power of two whose neighbours lie as far apart as the codes around x rounds x to them, and leaves the
    // number of steps from zero (below the normal numbers) or from a power of two in the low bits.
    let exponent = if capped & 0x7F80_0000 > LEAST { capped & 0x7F80_0000 } else { LEAST };
    let power = exponent + ((23 - 1) << 23);
    let steps = (f32::from_bits(capped) + f32::from_bits(power)).to_bits() - power;
    let code = (((exponent - LEAST) >> (23 - 1)) + steps) & 7;
    if magnitude > f32::INFINITY.to_bits() { 7 } else { code as u8 | sign }
}

/// Stochastic rounding with 8 random bits: |x| plus `random / 256` of the spacing at |x|, rounded down to the spacing
/// there, at most 6, with the sign of x; NaN gives +6.
#[inline(always)]
pub fn from_f32_stochastic(x: f32, random: u8) -> u8 {
    let magnitude = x.abs();
    let capped = if magnitude > MAX { MAX } else { magnitude };
    let spacing = if capped < 2.0 {
        0.5
    } else if capped < 4.0 {
        1.0
    } else {
        2.0
    };
    let moved = (f32::from(random) / 256.0).mul_add(spacing, capped);
    // Rounding down: no value lies between the moved one and the code below it.
    let below = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0].iter().map(|&v| u8::from(moved >= v)).sum::<u8>();
    if x.is_nan() { 7 } else { below | (x.to_bits() >> 28) as u8 & 8 }
}
