//! ue8m0: an 8-bit power of two, 2^(code - 127); 255 is NaN. NUMERICS.md, "Number formats".

/// The code that is no number.
pub const NAN: u8 = 0xFF;

/// The value of a code, exactly; code 0 is the subnormal 2^-127.
#[inline(always)]
pub const fn to_f32(code: u8) -> f32 {
    let bits = (code as u32) << 23;
    f32::from_bits(if code == 0 {
        0x0040_0000
    } else if code == NAN {
        f32::NAN.to_bits()
    } else {
        bits
    })
}

/// 1 over the value of a code, exactly: 2^(127 - code).
#[inline(always)]
pub const fn reciprocal(code: u8) -> f32 {
    if code == NAN { f32::NAN } else { to_f32(254 - code) }
}

/// The least power of two that is not below x, x >= +0; infinity and what lies above 2^127 give 2^127, NaN gives
/// [`NAN`].
#[inline(always)]
pub const fn from_f32(x: f32) -> u8 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    // A remainder below the power of two lifts the field by one. In the subnormals that power is 2^-127.
    let remainder = if bits < 0x0080_0000 { bits > 0x0040_0000 } else { bits & 0x007F_FFFF != 0 };
    saturate(bits, (bits >> 23) + remainder as u32)
}

/// The largest power of two that is not above x, x >= +0; what lies below 2^-127 gives 2^-127, infinity gives 2^127,
/// NaN gives [`NAN`].
#[inline(always)]
pub const fn from_f32_floor(x: f32) -> u8 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    saturate(bits, bits >> 23)
}

#[inline(always)]
const fn saturate(bits: u32, code: u32) -> u8 {
    let capped = (if code > 254 { 254 } else { code } & 0xFF) as u8;
    if bits > f32::INFINITY.to_bits() { NAN } else { capped }
}
