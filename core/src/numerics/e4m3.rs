//! e4m3 (the "fn" variant): 1 sign, 4 exponent and 3 fraction bits, bias 7, no infinity, one NaN for each sign.
//! NUMERICS.md, "Number formats".

/// The largest finite value.
pub const MAX: f32 = 448.0;
/// The code that a NaN converts to.
pub const NAN: u8 = 0x7F;

/// The exponent field that the smallest normal value has in f32, in place.
const LEAST: u32 = (127 - 6) << 23;

/// The value of a code, exactly; 0x7F and 0xFF are NaN.
#[inline(always)]
pub const fn to_f32(code: u8) -> f32 {
    let magnitude = (code & 0x7F) as u32;
    let sign = ((code & 0x80) as u32) << 24;
    // The bits moved to their place in f32, where the bias is 120 larger; subnormals included.
    let value = f32::from_bits(magnitude << 20) * f32::from_bits((127 + 120) << 23);
    let bits = if magnitude == NAN as u32 { f32::NAN.to_bits() } else { value.to_bits() };
    f32::from_bits(bits | sign)
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
    let power = exponent + ((23 - 3) << 23);
    let steps = (f32::from_bits(capped) + f32::from_bits(power)).to_bits() - power;
    let code = (((exponent - LEAST) >> (23 - 3)) + steps) & 0x7F;
    if magnitude > f32::INFINITY.to_bits() { NAN } else { code as u8 | sign }
}
