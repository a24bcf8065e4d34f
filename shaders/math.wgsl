// exp and log: NUMERICS.md, "exp and log". The twin of core/src/numerics/math.rs; where the numbers of a step are known
// to be normal and of known sizes, it takes fewer operations here.

const SQRT_HALF: u32 = 0x3F3504F3u;
const LN2_HI: u32 = 0x3F317200u;
const LN2_LO: u32 = 0x35BFBE8Eu;
// The significand of log2(e), 1.44 * 2^23.
const LOG2_E: u32 = 0x00B8AA3Bu;

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

// The integer nearest to x / ln 2, an even one if there are two; |x| < 128.
fn quotient_by_ln2(x: u32) -> i32 {
    let field = (x & MAGNITUDE) >> 23u;
    // The quotient's 48 bits less 173 - field of them; below 1/4 nothing is left.
    let product = product48((x & FRACTION) | HIDDEN, LOG2_E);
    let up = (field - 125u) & 15u;
    let whole = (product.y >> 1u) >> (31u - up);
    let part = product.y << up;
    let rest = (part >> 1u) | (part & 1u) | select(0u, 1u, product.x != 0u);
    let rounded = i32(select(whole, whole + 1u, rest + (whole & 1u) > 0x40000000u));
    return select(select(rounded, -rounded, (x & SIGN) != 0u), 0, field < 125u);
}

// x - n ln 2 for n, not 0, as above, with the one rounding of its second step: the first, n LN2_HI and what it leaves of
// x, is exact.
fn rest_by_ln2(x: u32, n: i32) -> u32 {
    // In units of 2^-25, as is a half of LN2_HI's significand.
    let whole = i32(((x & FRACTION) | HIDDEN) << (((x & MAGNITUDE) >> 23u) - 125u));
    let exact = select(whole, -whole, (x & SIGN) != 0u) - n * 0x0162E400;
    // In units of 2^-43, as is LN2_LO's significand: 18 bits below those.
    let low = n * -0x00BFBE8E;
    let below = u32(low) & 0x3FFFFu;
    let above = exact + (low >> 18u);
    let minus = above < 0;
    let part = select(below, (0x40000u - below) & 0x3FFFFu, minus);
    let magnitude = u32(select(above, select(-above, ~above, below != 0u), minus));
    // Its leading one goes to bit 31 of `top`.
    let high = (magnitude << 8u) | (part >> 10u);
    let rest = part << 22u;
    let up = countLeadingZeros(high) & 31u;
    let top = (high << up) | ((rest >> 1u) >> (31u - up));
    let lost = (top & 1u) | select(0u, 1u, (rest << up) != 0u);
    let bits = ((124u - up) << 23u) + round_7((top >> 1u) | lost);
    return select(0u, select(bits, bits | SIGN, minus), high != 0u);
}

// a * b + c with one rounding, for positive normal a and c and |a b| < c / 4; a `b` that is no normal number is as if it
// were zero.
fn fma_below(a: u32, b: u32, c: u32) -> u32 {
    let product = product48((a & FRACTION) | HIDDEN, (b & FRACTION) | HIDDEN);
    let exponent = c >> 23u;
    // Aligned with the addend, whose leading one is at bit 30; bit 0 stands for everything lost.
    let down = min(exponent + 127u - (a >> 23u) - ((b & MAGNITUDE) >> 23u), 31u);
    let lost = (product.y & ((1u << down) - 1u)) | product.x;
    let aligned = (product.y >> down) | select(0u, 1u, lost != 0u);
    let addend = ((c & FRACTION) | HIDDEN) << 7u;
    let sum = select(addend + aligned, addend - aligned, (b & SIGN) != 0u);
    // The leading one goes to bit 30 from there or beside it.
    let carry = sum >> 31u;
    let borrow = select(1u, 0u, sum >= 0x40000000u);
    let sig = ((sum >> carry) | (sum & carry)) << borrow;
    return ((exponent + carry - borrow - 1u) << 23u) + round_7(sig);
}

fn f32_exp(a: u32) -> u32 {
    // 89 and -104: beyond them the result is infinity or zero. A NaN passes through both comparisons.
    let below = select(a, 0x42B20000u, f32_lt(0x42B20000u, a));
    let x = select(below, 0xC2D00000u, f32_lt(below, 0xC2D00000u));
    let n = quotient_by_ln2(x);
    let r = select(rest_by_ln2(x, n), x, n == 0);
    // (exp(r) - 1 - r) / r^2 by Horner's rule, in a loop that compilers do not unroll.
    var q = 0x3AB54E89u;
    var coefficients = vec4<u32>(0x3C091EECu, 0x3D2AAC2Cu, 0x3E2AAA46u, 0x3EFFFFFEu);
    while coefficients.x != 0u {
        q = fma_below(q, r, coefficients.x);
        coefficients = vec4<u32>(coefficients.yzw, 0u);
    }
    let sum = f32_add(ONE, r);
    let lost = f32_sub(r, f32_sub(sum, ONE));
    let p = f32_add(sum, f32_fma(q, f32_mul(r, r), lost));
    let scaled = pack(0u, i32(p >> 23u) - 1 + n, ((p & FRACTION) | HIDDEN) << 7u);
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
