//! e5m2: 1 sign, 5 exponent and 2 fraction bits, bias 15; the upper half of binary16, with its infinity and NaNs.
//! NUMERICS.md, "Number formats".

/// The largest finite value.
pub const MAX: f32 = 57344.0;
/// The code of infinity. [`from_f32`] saturates and never gives it.
pub const INFINITY: u8 = 0x7C;
/// The code that a NaN converts to.
pub const NAN: u8 = 0x7F;

/// The exponent field that the smallest normal value has in f32, in place.
const LEAST: u32 = (127 - 14) << 23;

/// The value of a code, exactly.
#[inline(always)]
pub const fn to_f32(code: u8) -> f32 {
    let magnitude = (code & 0x7F) as u32;
    let sign = ((code & 0x80) as u32) << 24;
    // The bits moved to their place in f32, where the bias is 112 larger; subnormals included.
    let value = f32::from_bits(magnitude << 21) * f32::from_bits((127 + 112) << 23);
    let special = 0x7F80_0000 | (magnitude & 3) << 21;
    f32::from_bits(if magnitude >= INFINITY as u32 { special } else { value.to_bits() } | sign)
}

/// The code nearest to x, ties to even; beyond the largest finite value, infinity included, that value; NaN gives
/// [`NAN`].
#[inline(always)]
pub const fn from_f32(x: f32) -> u8 {
    let magnitude = x.to_bits() & 0x7FFF_FFFF;
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let capped = if magnitude > MAX.to_bits() { MAX.to_bits() } else { magnitude };
    // Adding a power of two whose neighbours lie as far apart as the codes around x rounds x to them, and leaves the
    // number of steps from zero (below the normal numbers) or from a power of two in the low bits.
    let exponent = if capped & 0x7F80_0000 > LEAST { capped & 0x7F80_0000 } else { LEAST };
    let power = exponent + ((23 - 2) << 23);
    let steps = (f32::from_bits(capped) + f32::from_bits(power)).to_bits() - power;
    let code = (((exponent - LEAST) >> (23 - 2)) + steps) & 0x7F;
    if magnitude > f32::INFINITY.to_bits() { NAN } else { code as u8 | sign }
}
