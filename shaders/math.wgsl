// exp and log: NUMERICS.md, "exp and log". The twin of core/src/numerics/math.rs, step by step.

const ROUND: u32 = 0x4B400000u;
const LOG2_E: u32 = 0x3FB8AA3Bu;
const LN2_HI: u32 = 0x3F317200u;
const LN2_LO: u32 = 0x35BFBE8Eu;
const SQRT_HALF: u32 = 0x3F3504F3u;

// 2^n for -126 <= n <= 127.
fn power_of_two(n: i32) -> u32 {
    return u32(n + 127) << 23u;
}

// The polynomial whose coefficients these are, the highest first, by Horner's rule. They end at the first zero, a bound
// that keeps compilers from unrolling the loop: the code of an fma is there once.
fn polynomial(x: u32, first: u32, next: vec4<u32>, last: vec4<u32>) -> u32 {
    var sum = first;
    var near = next;
    var far = last;
    while near.x != 0u {
        sum = f32_fma(sum, x, near.x);
        near = vec4<u32>(near.yzw, far.x);
        far = vec4<u32>(far.yzw, 0u);
    }
    return sum;
}

fn f32_exp(a: u32) -> u32 {
    // 89 and -104: beyond them the result is infinity or zero. A NaN passes through both comparisons.
    let below = select(a, 0x42B20000u, f32_lt(0x42B20000u, a));
    let x = select(below, 0xC2D00000u, f32_lt(below, 0xC2D00000u));
    let shifted = f32_fma(x, LOG2_E, ROUND);
    let n = f32_sub(shifted, ROUND);
    let r = f32_fma(f32_neg(LN2_LO), n, f32_fma(f32_neg(LN2_HI), n, x));
    let coefficients = vec4<u32>(0x3C091EECu, 0x3D2AAC2Cu, 0x3E2AAA46u, 0x3EFFFFFEu);
    let q = polynomial(r, 0x3AB54E89u, coefficients, vec4<u32>(0u));
    let sum = f32_add(ONE, r);
    let lost = f32_sub(r, f32_sub(sum, ONE));
    let p = f32_add(sum, f32_fma(q, f32_mul(r, r), lost));
    let exponent = i32(shifted - ROUND);
    let half = exponent >> 1u;
    // A NaN's exponent means nothing, so its powers must not matter.
    let scaled = f32_mul(f32_mul(p, power_of_two(half)), power_of_two(exponent - half));
    return select(scaled, NAN, is_nan(a));
}

fn f32_log(a: u32) -> u32 {
    let subnormal = f32_lt(a, HIDDEN);
    let scaled = select(a, f32_mul(a, power_of_two(23)), subnormal);
    let bits = scaled - SQRT_HALF;
    let n = f32_from_i32((i32(bits) >> 23u) - select(0, 23, subnormal));
    let f = f32_sub((bits & FRACTION) + SQRT_HALF, ONE);
    let high = vec4<u32>(0xBDD38F6Fu, 0x3DFBE719u, 0xBE01ABC0u, 0x3E1164D3u);
    let low = vec4<u32>(0xBE2A8542u, 0x3E4CD358u, 0xBE800064u, 0x3EAAAAA3u);
    let p = polynomial(f, 0x3D2CC40Du, high, low);
    let square = f32_mul(f, f);
    let small = f32_fma(LN2_LO, n, f32_fma(f32_mul(square, f), p, f32_mul(0xBF000000u, square)));
    let large = f32_mul(LN2_HI, n);
    let sum = f32_add(large, f);
    let lost = f32_sub(f, f32_sub(sum, large));
    let value = f32_add(sum, f32_add(lost, small));
    let finite = select(select(value, INF, a == INF), SIGN | INF, (a & MAGNITUDE) == 0u);
    // True for a negative a and for NaN.
    return select(finite, NAN, !f32_le(0u, a));
}

fn f32_sigmoid(a: u32) -> u32 {
    return f32_div(ONE, f32_add(ONE, f32_exp(f32_neg(a))));
}

fn f32_silu(a: u32) -> u32 {
    return f32_div(a, f32_add(ONE, f32_exp(f32_neg(a))));
}
