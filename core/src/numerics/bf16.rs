//! bf16: the upper half of binary32. Conversions are exact one way and round to nearest even the other way.

/// The value of a bf16 code.
#[inline(always)]
pub const fn to_f32(code: u16) -> f32 {
    f32::from_bits((code as u32) << 16)
}

/// The bf16 nearest to x, ties to even; overflow gives infinity; a NaN stays a (quiet) NaN.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the upper halves of 32 bits")]
pub const fn from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16;
    let nan = ((bits >> 16) | 0x40) as u16;
    if bits & 0x7FFF_FFFF > 0x7F80_0000 { nan } else { rounded }
}

/// x rounded to bf16 and back.
#[inline(always)]
pub const fn round(x: f32) -> f32 {
    to_f32(from_f32(x))
}
