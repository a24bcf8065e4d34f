// One step of a tensor core on integers: NUMERICS.md, "Hopper", bf16. The twin of core/src/numerics/mma.rs. Slow: for what
// cannot be left to a tensor core.

// Products that one step adds.
constexpr u32 STEP = 16;

// m * 2^by, truncated toward zero; what is lost on the left is zero.
__device__ __forceinline__ u64 shifted(u64 m, i32 by) { return by >= 0 ? m << min(by, 63) : m >> min(-by, 63); }

// `acc` and STEP products; `factors(i)`: the codes of the two of product i, the left one in the low half. It is called by
// all lanes of the warp together, twice for each i.
template <class Factors>
__device__ __forceinline__ float tensor_core_step(float acc, Factors factors) {
    // Exponents are sums of two fields: those of values plus 254. Grid and accumulator have as many fraction bits.
    constexpr i32 BIAS = 254, GRID = 25, FRACTION = 23, PRODUCT_FRACTION = 14;
    const u32 acc_bits = __float_as_uint(acc), acc_field = acc_bits >> 23 & 0xFF;
    const u64 acc_significand = (acc_bits & 0x7FFFFFu) | (acc_field > 0 ? 0x800000u : 0u);
    const i32 acc_exponent = i32(max(acc_field, 1u)) + BIAS - 127;

    const auto special = [](u32 x) { return (x >> 7 & 0xFF) == 0xFF; };
    const auto significand = [](u32 x) { return (x & 0x7F) | ((x >> 7 & 0xFF) > 0 ? 0x80u : 0u); };
    const auto exponent = [](u32 x) { return i32(max(x >> 7 & 0xFF, 1u)); };

    bool any_special = acc_field == 0xFF;
    // Of infinities and NaN f32 addition knows what the rule says.
    float specials = any_special ? acc : 0.0f;
    i32 largest = !any_special && acc_significand > 0 ? acc_exponent : 0;
#pragma unroll 1
    for (u32 i = 0; i < STEP; i++) {
        const u32 both = factors(i), x = both & 0xFFFF, y = both >> 16;
        if (special(x) || special(y)) {
            any_special = true;
            specials += __uint_as_float(x << 16) * __uint_as_float(y << 16);
        } else if (significand(x) > 0 && significand(y) > 0) {
            largest = max(largest, exponent(x) + exponent(y));
        }
    }

    i64 total = i64(any_special ? 0 : shifted(acc_significand, acc_exponent - FRACTION - (largest - GRID)));
    total = acc_bits >> 31 != 0 ? -total : total;
#pragma unroll 1
    for (u32 i = 0; i < STEP; i++) {
        const u32 both = factors(i), x = both & 0xFFFF, y = both >> 16;
        const u64 product = special(x) || special(y) ? 0 : significand(x) * significand(y);
        const i64 term = i64(shifted(product, exponent(x) + exponent(y) - PRODUCT_FRACTION - (largest - GRID)));
        total += ((x ^ y) >> 15 & 1) != 0 ? -term : term;
    }

    const u64 magnitude = total < 0 ? -total : total;
    const i32 grid = largest - GRID - BIAS, top = 63 - __clzll(i64(magnitude)) + grid;
    // The last bit kept; it stops falling at the subnormals.
    const i32 last = max(top, -126) - FRACTION;
    const u32 fraction = u32(shifted(magnitude, grid - last)) & 0x7FFFFFu, field = top < -126 ? 0 : u32(top + 127);
    const u32 sign = total < 0 ? 0x80000000u : 0u;
    float sum = __uint_as_float(sign | (top > 127 ? INFINITY_BITS : field << 23 | fraction));
    sum = total == 0 ? 0.0f : sum;
    return any_special ? specials : sum;
}
