//! exp and log as one fixed polynomial each, in f32 with `fma` where `mul_add` is written; no table and no branch, so
//! that loops over them vectorise and shaders follow them step by step. And what is made of ex2 and rcp. NUMERICS.md,
//! "exp and log" and "ex2 and rcp".
//!
//! Without FMA instructions `mul_add` is a library call: right, but slow. The host calls these inside `simd::with`.

use super::special::{ex2, rcp};

/// 1.5 * 2^23: adding it to a float below 2^22 rounds that to an integer, which then sits in the low bits.
const ROUND: f32 = 12_582_912.0;
/// The logarithm of e to base 2, rounded to f32.
pub const LOG2_E: f32 = f32::from_bits(0x3FB8_AA3B);
/// The upper 15 bits of ln 2, so that products with exponents are exact.
const LN2_HI: f32 = f32::from_bits(0x3F31_7200);
/// ln 2 - [`LN2_HI`].
const LN2_LO: f32 = f32::from_bits(0x35BF_BE8E);

/// 2^n for -126 <= n <= 127.
#[inline(always)]
const fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// e^x, at most 0.81 ULP from the exact value. Overflow gives infinity, underflow rounds to subnormals and zero.
///
/// # Numerics
/// x = n ln 2 + r with n the integer nearest to x / ln 2; e^r is a polynomial of degree 6 in r, with
/// the rounding error of 1 + r carried into its small terms; 2^n is applied in two
/// factors, of which only the last can round.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Beyond these the result is infinity or zero. A NaN passes through both comparisons.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = (-LN2_LO).mul_add(n, (-LN2_HI).mul_add(n, x));
    let mut q = f32::from_bits(0x3AB5_4E89);
    q = q.mul_add(r, f32::from_bits(0x3C09_1EEC));
    q = q.mul_add(r, f32::from_bits(0x3D2A_AC2C));
    q = q.mul_add(r, f32::from_bits(0x3E2A_AA46));
    q = q.mul_add(r, f32::from_bits(0x3EFF_FFFE));
    let sum = 1.0 + r;
    let lost = r - (sum - 1.0);
    let p = sum + q.mul_add(r * r, lost);
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// ln x, at most 0.85 ULP from the exact value. log(+-0) = -inf, log(inf) = inf, a negative x gives NaN.
///
/// # Numerics
/// x = 2^n (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); ln(1 + f) = f - f^2 / 2 + f^3 P(f), P of degree 8. The rounding
/// error of n ln 2 + f is carried into the small terms.
#[inline(always)]
pub fn log(x: f32) -> f32 {
    const SQRT_HALF: u32 = 0x3F35_04F3;
    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * power_of_two(23) } else { x };
    let bits = scaled.to_bits().wrapping_sub(SQRT_HALF);
    let n = ((bits as i32) >> 23) - if subnormal { 23 } else { 0 };
    let f = f32::from_bits((bits & 0x007F_FFFF) + SQRT_HALF) - 1.0;
    // -149 <= n <= 128, exactly a float.
    let n = n as f32;
    let mut p = f32::from_bits(0x3D2C_C40D);
    p = p.mul_add(f, f32::from_bits(0xBDD3_8F6F));
    p = p.mul_add(f, f32::from_bits(0x3DFB_E719));
    p = p.mul_add(f, f32::from_bits(0xBE01_ABC0));
    p = p.mul_add(f, f32::from_bits(0x3E11_64D3));
    p = p.mul_add(f, f32::from_bits(0xBE2A_8542));
    p = p.mul_add(f, f32::from_bits(0x3E4C_D358));
    p = p.mul_add(f, f32::from_bits(0xBE80_0064));
    p = p.mul_add(f, f32::from_bits(0x3EAA_AAA3));
    let square = f * f;
    let small = LN2_LO.mul_add(n, (square * f).mul_add(p, -0.5 * square));
    let large = LN2_HI * n;
    let sum = large + f;
    let lost = f - (sum - large);
    let value = sum + (lost + small);
    let value = if x == f32::INFINITY { x } else { value };
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    // True for a negative x and for NaN.
    if x >= 0.0 { value } else { f32::NAN }
}

/// 1 / (1 + e^-x) by ex2 and rcp.
///
/// # Numerics
/// `rcp(1 + ex2(-x * LOG2_E))`: +0 from about -87.3 on downwards, where the result would be subnormal, -infinity
/// included; 1 for +infinity.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    rcp(1.0 + ex2(-x * LOG2_E))
}

/// `x * sigmoid(x)`; for -infinity, as the product of infinity and 0, NaN.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}
