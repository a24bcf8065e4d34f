// One step of a matrix unit in 32-bit integers: NUMERICS.md, "Matrix products". The twin of core/src/numerics/mma.rs.
//
// Constants of the unit, given by the dispatch: STEP products in a step, FRACTION_BITS kept below the exponent of the
// largest term, RESULT_BITS in the fraction of a result.
//
// An infinity or a NaN costs no branch here: its exponent is above all others, so the result is an infinity with the sign
// of the terms that have it. `highest` tells whether there was one; what has to be a NaN is found afterwards by
// `chain_is_nan`, for once in such a chain a NaN stays one, and infinities of both signs cannot end in anything else.

// A factor: the exponent field of its format (subnormals have 1), and the signed significand (1.7 fixed point).
struct Term {
    exponent: i32,
    sig: i32,
}

// Exponents of zeros and of infinities and NaN. A sum of two tells what they are: below 0 there is a zero in it, and from
// INFINITE on a special factor. OUTSIDE: of a left factor whose product is a zero whatever the right factor is.
const ABSENT: i32 = -4096;
const OUTSIDE: i32 = -20480;
const SPECIAL: i32 = 12288;
const INFINITE: i32 = 4096;
// A product's exponent sum less that of its value.
const SUM_BIAS: i32 = 254;
// Places by which the left significands lie higher: a product's leading ones are at bits 29 and 30.
const LEFT_SHIFT: u32 = 15u;

// Terms of the invocation's present row, and of each of its columns. Every index into them is a constant, so they are
// registers.
var<private> left: array<Term, STEP>;
var<private> right: array<array<Term, STEP>, TILE>;
// The largest exponent of a product so far.
var<private> highest: i32;

// `sig` without its hidden bit, which is bit 7 and set where `field` is not 0. `minus` is 0 or 1.
fn term(minus: u32, field: u32, sig: u32, exponent: i32) -> Term {
    let flip = -i32(minus);
    let whole = sig | (min(field, 1u) << 7u);
    return Term(select(exponent, ABSENT, whole == 0u), (i32(whole) ^ flip) - flip);
}

fn term_from_bf16(value: u32) -> Term {
    let field = (value >> 23u) & 0xFFu;
    let exponent = select(i32(max(field, 1u)), SPECIAL, field == 255u);
    return term(value >> 31u, field, (value >> 16u) & 0x7Fu, exponent);
}

fn term_from_e4m3(code: u32) -> Term {
    let field = (code >> 3u) & 15u;
    let exponent = select(120 + i32(max(field, 1u)), SPECIAL, (code & 0x7Fu) == 0x7Fu);
    return term(code >> 7u, field, (code & 7u) << 4u, exponent);
}

// The accumulator plus the products of the present row and column c.
fn mma_step(c: u32, acc: u32) -> u32 {
    var top = 2 * ABSENT;
    for (var i = 0u; i < STEP; i += 1u) { // unrolled
        top = max(top, left[i].exponent + right[c][i].exponent);
    }
    highest = max(highest, top);
    let acc_field = i32((acc >> 23u) & 0xFFu);
    let acc_sig = (acc & FRACTION) | select(0u, HIDDEN, acc_field != 0);
    let acc_exponent = select(max(acc_field, 1) + SUM_BIAS - 127, 2 * ABSENT, acc_sig == 0u);
    let largest = max(top, acc_exponent);

    // Products have 29 fraction bits, and nothing is left of them after 31 places. 16 of the largest stay below 2^31.
    let aligned = 29 - i32(FRACTION_BITS) + largest;
    var floors = 0;
    var negatives = 0;
    for (var i = 0u; i < STEP; i += 1u) { // unrolled
        let product = left[i].sig * right[c][i].sig;
        let down = min(u32(aligned - (left[i].exponent + right[c][i].exponent)), 31u);
        // An arithmetic shift of the ones' complement truncates toward zero, and is one less for a negative product.
        let flip = product >> 31u;
        floors += (product + flip) >> down;
        negatives += flip;
    }
    // It is the count itself; the bound keeps compilers from a second shift for each term.
    let sum = floors - max(negatives, -i32(STEP));

    // With the accumulator the sum may pass 2^31, so magnitudes and signs part here.
    let addend = (acc_sig << 2u) >> min(u32(25 - i32(FRACTION_BITS) + largest - acc_exponent), 31u);
    let products = u32(abs(sum));
    let sum_sign = u32(sum) & SIGN;
    let opposite = ((sum_sign ^ acc) & SIGN) != 0u;
    let difference = max(products, addend) - min(products, addend);
    let total = select(products + addend, difference, opposite);
    let sign = select(acc & SIGN, sum_sign, products > addend);

    // Truncated toward zero to RESULT_BITS; in the subnormals the last bit stands still.
    let lead = countLeadingZeros(total);
    let field = min(i32(31u - lead) + largest - SUM_BIAS - i32(FRACTION_BITS) + 127, 255);
    let sig = (total << (lead & 31u)) >> 8u;
    let bits = (u32(max(field - 1, 0)) << 23u) + (sig >> u32(clamp(1 - field, 0, 31)));
    let kept = bits & ~((1u << (23u - RESULT_BITS)) - 1u);
    let result = select(sign | min(kept, INF), 0u, total == 0u);
    // An infinite accumulator stays, unless it meets the other infinity.
    return select(result, select(acc, NAN, top >= INFINITE && opposite), acc_field == 255);
}

// What the products of a chain's special factors are.
struct Specials {
    nan: bool,
    positive: bool,
    negative: bool,
}

fn with_product(seen: Specials, x: Term, y: Term) -> Specials {
    let x_special = x.exponent == SPECIAL;
    let y_special = y.exponent == SPECIAL;
    // Infinity has a significand of exactly one.
    let nan = (x_special && abs(x.sig) != 0x80) || (y_special && abs(y.sig) != 0x80);
    let infinite = x_special || y_special;
    let minus = (x.sig ^ y.sig) < 0;
    let times_zero = infinite && (x.sig == 0 || y.sig == 0);
    return Specials(
        seen.nan || nan || times_zero,
        seen.positive || (infinite && !minus),
        seen.negative || (infinite && minus),
    );
}
