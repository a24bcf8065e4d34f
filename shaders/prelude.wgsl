// IEEE-754 binary32 in integers: NUMERICS.md, "Scalars". Every value is the bits of an f32 in a u32.
//
// Round to nearest even, subnormals kept, no contraction. WGSL's own floats cannot promise any of that. An operation
// that gives a NaN gives `NAN`. Both sides of a choice are computed and one is selected: lanes of a GPU walk together.

const SIGN: u32 = 0x80000000u;
const MAGNITUDE: u32 = 0x7FFFFFFFu;
const INF: u32 = 0x7F800000u;
const NAN: u32 = 0x7FC00000u;
const HIDDEN: u32 = 0x00800000u;
const FRACTION: u32 = 0x007FFFFFu;
const ONE: u32 = 0x3F800000u;
// log2(e), rounded.
const LOG2_OF_E: u32 = 0x3FB8AA3Bu;

// The exponent of zero: below every other, so that a zero never decides an alignment.
const OF_ZERO: i32 = -1000;

// A finite magnitude: sig * 2^(exponent - 150), sig in [2^23, 2^24) or 0.
struct Unpacked {
    exponent: i32,
    sig: u32,
}

fn unpack(magnitude: u32) -> Unpacked {
    let field = magnitude >> 23u;
    let sig = (magnitude & FRACTION) | select(0u, HIDDEN, field != 0u);
    // Brings the leading one of a subnormal to bit 23.
    let shift = countLeadingZeros(sig) - 8u;
    let exponent = i32(max(field, 1u)) - i32(shift);
    return Unpacked(select(exponent, OF_ZERO, sig == 0u), sig << shift);
}

// Rounds sig * 2^-7 to the nearest integer, to an even one if there are two.
fn round_7(sig: u32) -> u32 {
    return (sig + 63u + ((sig >> 7u) & 1u)) >> 7u;
}

// Rounds sig, whose leading one is at bit 30 and whose bit 0 stands for everything lost below. `exponent` is one less
// than the exponent field of the result, as the leading one adds itself to the field.
fn pack(sign: u32, exponent: i32, sig: u32) -> u32 {
    let down = u32(clamp(-exponent, 0, 31));
    let lost = sig & ((1u << down) - 1u);
    let kept = (sig >> down) | select(0u, 1u, lost != 0u);
    let bits = (u32(max(exponent, 0)) << 23u) + round_7(kept);
    return sign | select(min(bits, INF), 0u, sig == 0u);
}

// x * y, x and y below 2^24: the bits from 16 on in .y, those below in .x.
fn product48(x: u32, y: u32) -> vec2<u32> {
    // A byte of y at a time: x * 255 plus what the last step carries stays below 2^32.
    let low = x * (y & 0xFFu);
    let middle = x * ((y >> 8u) & 0xFFu) + (low >> 8u);
    let high = x * (y >> 16u) + (middle >> 8u);
    return vec2<u32>(((middle & 0xFFu) << 8u) | (low & 0xFFu), high);
}

fn f32_neg(a: u32) -> u32 {
    return a ^ SIGN;
}

fn f32_abs(a: u32) -> u32 {
    return a & MAGNITUDE;
}

fn is_nan(a: u32) -> bool {
    return (a & MAGNITUDE) > INF;
}

fn f32_mul(a: u32, b: u32) -> u32 {
    let sign = (a ^ b) & SIGN;
    let ma = a & MAGNITUDE;
    let mb = b & MAGNITUDE;
    let x = unpack(ma);
    let y = unpack(mb);
    let product = product48(x.sig, y.sig);
    let jammed = product.y | select(0u, 1u, product.x != 0u);
    // The product of two significands is in [1, 4).
    let carry = jammed >> 31u;
    let sig = (jammed >> carry) | (jammed & carry);
    let finite = pack(sign, x.exponent + y.exponent - 128 + i32(carry), sig);
    let special = select(sign | INF, NAN, max(ma, mb) > INF || min(ma, mb) == 0u);
    return select(finite, special, max(ma, mb) >= INF);
}

fn f32_add(a: u32, b: u32) -> u32 {
    let swap = (a & MAGNITUDE) < (b & MAGNITUDE);
    let large = select(a, b, swap);
    let small = select(b, a, swap);
    let ml = large & MAGNITUDE;
    let ms = small & MAGNITUDE;
    // A subnormal has the exponent of field 1 and no hidden bit.
    let el = max(ml >> 23u, 1u);
    let es = max(ms >> 23u, 1u);
    let x = ((ml & FRACTION) | select(0u, HIDDEN, ml >= HIDDEN)) << 6u;
    let y = ((ms & FRACTION) | select(0u, HIDDEN, ms >= HIDDEN)) << 6u;
    let down = min(el - es, 31u);
    let aligned = (y >> down) | select(0u, 1u, (y & ((1u << down) - 1u)) != 0u);
    let sum = select(x + aligned, x - aligned, ((a ^ b) & SIGN) != 0u);
    // The leading one goes to bit 30, but no further than to the subnormals, where a sum is exact.
    let up = min(countLeadingZeros(sum) - 1u, el);
    let sig = sum << up;
    let bits = (large & SIGN) | min(((el - up) << 23u) + round_7(sig), INF);
    // -0 only from -0 + -0.
    let finite = select(bits, a & b & SIGN, sum == 0u);
    let special = select(large, NAN, ml > INF || (ms == INF && a != b));
    return select(finite, special, ml >= INF);
}

fn f32_sub(a: u32, b: u32) -> u32 {
    return f32_add(a, b ^ SIGN);
}

// x * 2^-by with bit 0 standing for everything lost; .x is the low word. by < 64.
fn shift_right_jam(x: vec2<u32>, by: u32) -> vec2<u32> {
    let whole = by >= 32u;
    let low = select(x.x, x.y, whole);
    let high = select(x.y, 0u, whole);
    let rest = by & 31u;
    let dropped = select(0u, x.x, whole) | (low & ((1u << rest) - 1u));
    // high << (32 - rest), also for rest = 0.
    let carried = (high << 1u) << (31u - rest);
    return vec2<u32>((low >> rest) | carried | select(0u, 1u, dropped != 0u), high >> rest);
}

// a * b + c with one rounding.
fn f32_fma(a: u32, b: u32, c: u32) -> u32 {
    let sign = (a ^ b) & SIGN;
    let ma = a & MAGNITUDE;
    let mb = b & MAGNITUDE;
    let mc = c & MAGNITUDE;
    let x = unpack(ma);
    let y = unpack(mb);
    let z = unpack(mc);

    // Both terms as 64-bit integers in which bit 60 has the weight 1: the product fills 14.., the addend 37...
    let halves = product48(x.sig, y.sig);
    let product = vec2<u32>((halves.y << 30u) | (halves.x << 14u), halves.y >> 2u);
    let addend = vec2<u32>(0u, z.sig << 5u);
    let ep = x.exponent + y.exponent - 127;
    let gap = ep - z.exponent;
    let p = shift_right_jam(product, u32(clamp(-gap, 0, 63)));
    let q = shift_right_jam(addend, u32(clamp(gap, 0, 63)));

    // p + q or p - q in two's complement, then its magnitude.
    let opposite = ((sign ^ c) & SIGN) != 0u;
    let flip = select(0u, 0xFFFFFFFFu, opposite);
    let low = p.x + (q.x ^ flip) + select(0u, 1u, opposite);
    let carry = select((low < p.x), (p.x >= q.x), opposite);
    let high = p.y + (q.y ^ flip) + select(0u, 1u, carry);
    let negative = (high >> 31u) != 0u;
    let sum_low = select(low, 0u - low, negative);
    let sum_high = select(high, ~high + select(0u, 1u, low == 0u), negative);
    let sum_sign = select(sign, sign ^ SIGN, negative);

    // The leading one goes to bit 62, and the upper word is what `pack` takes.
    let in_low = sum_high == 0u;
    let lead = countLeadingZeros(select(sum_high, sum_low, in_low)) + select(0u, 32u, in_low);
    let up = lead - 1u;
    let word = select(sum_high, sum_low, up >= 32u);
    let below = select(sum_low, 0u, up >= 32u);
    let by = up & 31u;
    // lead = 0 cannot be: the sum stays below 2^63. lead = 32 makes up = 31, all in the upper word.
    let top = (word << by) | ((below >> 1u) >> (31u - by));
    let sig = top | select(0u, 1u, (below << by) != 0u);
    let exponent = max(ep, z.exponent) + 1 - i32(up);
    let zero = (sum_low | sum_high) == 0u;
    let finite = select(pack(sum_sign, exponent, sig), sign & c & SIGN, zero);

    let product_special = max(ma, mb) >= INF;
    let product_nan = max(ma, mb) > INF || (product_special && min(ma, mb) == 0u);
    let nan = product_nan || mc > INF || (product_special && mc == INF && opposite);
    let special = select(select(c, sign | INF, product_special), NAN, nan);
    return select(finite, special, product_special || mc >= INF);
}

fn f32_div(a: u32, b: u32) -> u32 {
    let sign = (a ^ b) & SIGN;
    let ma = a & MAGNITUDE;
    let mb = b & MAGNITUDE;
    let x = unpack(ma);
    let y = unpack(mb);
    // The quotient of the significands in [1, 2): its first bit, then 24 more by long division. Compilers leave a loop
    // alone whose bound is no counter, and are done sooner.
    let smaller = x.sig < y.sig;
    var rest = (x.sig << select(0u, 1u, smaller)) - y.sig;
    var quotient = 1u;
    while quotient < 0x01000000u {
        for (var i = 0u; i < 8u; i += 1u) { // unrolled
            rest <<= 1u;
            let fits = rest >= y.sig;
            rest -= select(0u, y.sig, fits);
            quotient = (quotient << 1u) | select(0u, 1u, fits);
        }
    }
    let sig = (quotient << 6u) | select(0u, 1u, rest != 0u);
    let finite = pack(sign, x.exponent - y.exponent + 126 - select(0, 1, smaller), sig);
    let nan = max(ma, mb) > INF || (ma == mb && (ma == 0u || ma == INF));
    let infinite = ma == INF || mb == 0u;
    let zero = mb == INF || ma == 0u;
    return select(select(select(finite, sign, zero), sign | INF, infinite), NAN, nan);
}

fn f32_sqrt(a: u32) -> u32 {
    let x = unpack(a & MAGNITUDE);
    // An even exponent; the radicand is in [1, 4) with 23 fraction bits.
    let odd = u32(x.exponent + 1) & 1u;
    var digits = (x.sig << odd) << 7u;
    // Two bits of the radicand give one bit of the root: a first one, which is set, then 24 more with one for rounding.
    var rest = (digits >> 30u) - 1u;
    var root = 1u;
    while root < 0x01000000u {
        for (var i = 0u; i < 8u; i += 1u) { // unrolled
            digits <<= 2u;
            rest = (rest << 2u) | (digits >> 30u);
            let trial = (root << 2u) | 1u;
            let fits = rest >= trial;
            rest -= select(0u, trial, fits);
            root = (root << 1u) | select(0u, 1u, fits);
        }
    }
    let sig = (root << 6u) | select(0u, 1u, rest != 0u);
    let field = (x.exponent - i32(odd) + 127) >> 1u;
    let positive = select(pack(0u, field - 1, sig), INF, a == INF);
    let nan = is_nan(a) || a > SIGN;
    return select(select(positive, a, (a & MAGNITUDE) == 0u), NAN, nan);
}

// Integers in the order of the numbers; both zeros are 0.
fn f32_order(a: u32) -> i32 {
    let magnitude = i32(a & MAGNITUDE);
    return select(magnitude, -magnitude, (a & SIGN) != 0u);
}

fn f32_lt(a: u32, b: u32) -> bool {
    return f32_order(a) < f32_order(b) && !is_nan(a) && !is_nan(b);
}

fn f32_le(a: u32, b: u32) -> bool {
    return f32_order(a) <= f32_order(b) && !is_nan(a) && !is_nan(b);
}

// The larger one; the number if one is a NaN.
fn f32_max(a: u32, b: u32) -> u32 {
    return select(a, b, is_nan(a) || f32_lt(a, b));
}

fn f32_from_u32(x: u32) -> u32 {
    let lead = countLeadingZeros(x);
    let sig = x << (lead & 31u);
    return select(pack(0u, 157 - i32(lead), (sig >> 1u) | (sig & 1u)), 0u, x == 0u);
}

fn f32_from_i32(x: i32) -> u32 {
    return f32_from_u32(u32(abs(x))) | (u32(x) & SIGN);
}
