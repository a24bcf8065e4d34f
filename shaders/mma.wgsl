// One step of a matrix unit in 32-bit integers: NUMERICS.md, "Matrix products". The twin of core/src/numerics/mma.rs.
//
// A factor is a term: sign in bit 31, exponent from bit 17 on, significand (1.7 fixed point, subnormals with the least
// exponent) in bits 0..8. The sum of two terms then has the product's sign in bit 31 and its exponent from bit 17 on, and
// their 32-bit product has the product of the significands, below 2^16, in its low 17 bits.
//
// Exponents are biased such that sums tell what they are: nonzero numbers have 512 + field, zeros 0, infinities and NaN
// SPECIAL. So a product with a zero has a sum below 1024, and one with a special factor a sum from SPECIAL on.

// Constants of the unit, given by the dispatch: STEP products in a step, FRACTION_BITS kept below the exponent of the
// largest term, RESULT_BITS in the fraction of a result. An invocation has TILE x TILE outputs: `left` holds STEP terms of
// each of its rows, `right` of each of its columns. Every index into them is a constant once loops are unrolled, so they
// are registers.

var<private> left: array<array<u32, STEP>, TILE>;
var<private> right: array<array<u32, STEP>, TILE>;

const SPECIAL: u32 = 2047u;
// A product's exponent sum less that of its value.
const SUM_BIAS: i32 = 1278;

fn exponent_of(term: u32) -> u32 {
    return (term << 1u) >> 18u;
}

fn term_from_bf16(code: u32) -> u32 {
    let field = (code >> 7u) & 0xFFu;
    let sig = (code & 0x7Fu) | select(0u, 0x80u, field != 0u);
    let exponent = select(512u + max(field, 1u), SPECIAL, field == 255u);
    return select(((code & 0x8000u) << 16u) | (exponent << 17u) | sig, 0u, sig == 0u);
}

fn term_from_e4m3(code: u32) -> u32 {
    let field = (code >> 3u) & 15u;
    let sig = ((code & 7u) | select(0u, 8u, field != 0u)) << 4u;
    let nan = (code & 0x7Fu) == 0x7Fu;
    let exponent = select(512u + 120u + max(field, 1u), SPECIAL, nan);
    return select(((code & 0x80u) << 24u) | (exponent << 17u) | sig, 0u, sig == 0u);
}

// The accumulator of row r and column c plus the products of their terms.
fn mma_step(r: u32, c: u32, acc: u32) -> u32 {
    var top = 0u;
    for (var i = 0u; i < STEP; i += 1u) {
        top = max(top, (left[r][i] + right[c][i]) << 1u);
    }
    let acc_magnitude = acc & MAGNITUDE;
    let acc_field = acc_magnitude >> 23u;
    if (top >> 18u) >= SPECIAL || acc_field == 255u {
        return mma_special(r, c, acc);
    }
    // The accumulator's exponent on the scale of the sums.
    let acc_exponent = select(max(acc_field, 1u) + 1151u, 0u, acc_magnitude == 0u);
    let largest = max(top >> 18u, acc_exponent);

    var sum = 0;
    for (var i = 0u; i < STEP; i += 1u) {
        let x = left[r][i];
        let y = right[c][i];
        let both = x + y;
        // The product of the significands at bit 30 has 29 fraction bits, and nothing is left of it after 31 places.
        let down = min(29u - FRACTION_BITS + largest - exponent_of(both), 31u);
        let magnitude = i32(((x * y) << 15u) >> down);
        let flip = i32(both) >> 31u;
        // 16 products of the largest significands stay below 2^31.
        sum += (magnitude ^ flip) - flip;
    }

    let acc_sig = (acc & FRACTION) | select(0u, HIDDEN, acc_field != 0u);
    let addend = (acc_sig << 2u) >> min(25u - FRACTION_BITS + largest - acc_exponent, 31u);
    // With the accumulator the sum may pass 2^31, so magnitudes and signs part here.
    let products = u32(abs(sum));
    let sum_sign = u32(sum) & SIGN;
    let opposite = ((sum_sign ^ acc) & SIGN) != 0u;
    let difference = max(products, addend) - min(products, addend);
    let total = select(products + addend, difference, opposite);
    let sign = select(acc & SIGN, sum_sign, products > addend);

    // Cut towards zero to RESULT_BITS; in the subnormals the last bit stands still.
    let lead = countLeadingZeros(total);
    let field = i32(31u - lead) + i32(largest) - SUM_BIAS - i32(FRACTION_BITS) + 127;
    let sig = (total << (lead & 31u)) >> 8u;
    let bits = (u32(max(field - 1, 0)) << 23u) + (sig >> u32(clamp(1 - field, 0, 31)));
    let kept = bits & ~((1u << (23u - RESULT_BITS)) - 1u);
    return select(sign | min(kept, INF), 0u, total == 0u);
}

// The same with an infinity or a NaN among the terms.
fn mma_special(r: u32, c: u32, acc: u32) -> u32 {
    var nan = is_nan(acc);
    var positive = acc == INF;
    var negative = acc == (SIGN | INF);
    for (var i = 0u; i < STEP; i += 1u) {
        let x = left[r][i];
        let y = right[c][i];
        let x_special = exponent_of(x) == SPECIAL;
        let y_special = exponent_of(y) == SPECIAL;
        if x_special || y_special {
            let sig_x = x & 0xFFu;
            let sig_y = y & 0xFFu;
            // Infinity has a significand of exactly one.
            nan = nan || (x_special && sig_x != 0x80u) || (y_special && sig_y != 0x80u) || min(sig_x, sig_y) == 0u;
            let minus = ((x ^ y) & SIGN) != 0u;
            positive = positive || !minus;
            negative = negative || minus;
        }
    }
    return select(select(INF, SIGN | INF, negative), NAN, nan || (positive && negative));
}
