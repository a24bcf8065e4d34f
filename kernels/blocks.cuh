// Block formats: NUMERICS.md, "Block formats". The twin of core/src/numerics/blocks.rs.
//
// Constants: FORMAT and OPTION (MXFP8: round the exponent down; FP8 blocks: keep the f32 scale; NVFP4: stochastic).

constexpr u32 MXFP8 = 0, FP8_BLOCK = 1, NVFP4 = 2;
// Elements along a block.
constexpr u32 BLOCK = FORMAT == MXFP8 ? 32 : FORMAT == FP8_BLOCK ? 128 : 16;
constexpr float LARGEST = 0x1.fffffep127f;

// What is stored for a block (a code, or the bits of an f32), and the factor that brings its values into the range of
// the codes.
struct Scale {
    u32 stored;
    float factor;
};

__device__ __forceinline__ bool usable(float amax) { return amax > 0.0f && amax < INFINITY_F32; }

__device__ __forceinline__ Scale mxfp8_scale(float amax) {
    // The largest power of two in e4m3 is 2^8.
    const u32 stored = OPTION == 1 ? ue8m0_from_f32_floor(amax * 0x1p-8f) : ue8m0_from_f32(amax * (1.0f / 448.0f));
    return {stored, ue8m0_reciprocal(stored)};
}

__device__ __forceinline__ Scale fp8_scale(float amax) {
    if constexpr (OPTION == 1) {
        const float factor = usable(amax) ? fminf(448.0f / amax, LARGEST) : 1.0f;
        return {__float_as_uint(1.0f / factor), factor};
    }
    // The quotient's exponent without a division: 448 is 1.75 * 2^8, and the largest factor 2^127.
    const u32 bits = __float_as_uint(amax), smaller = (bits & 0x7FFFFFu) > 0x600000u ? 1 : 0;
    const u32 exponent = usable(amax) ? min(262 - (bits >> 23) - smaller, 254u) : 127;
    return {exponent == 254 ? 0x400000u : (254 - exponent) << 23, __uint_as_float(exponent << 23)};
}

// `whole`: the amax of the tensor.
__device__ __forceinline__ Scale nvfp4_scale(float amax, float whole) {
    const float encode = usable(whole) ? fminf(2688.0f / whole, LARGEST) : 1.0f;
    const u32 stored = e4m3_from_f32(fminf(amax * (encode * (1.0f / 6.0f)), LARGEST));
    const float factor = fminf(1.0f / (e4m3_to_f32(stored) * (1.0f / encode)), LARGEST);
    // Under a scale of zero every code decodes to zero; zero codes say so.
    return {stored, stored == 0 ? 0.0f : factor};
}

// Two codes, the first in the low byte. The conversion is the one of NUMERICS.md: nearest even, saturating, 0x7F for NaN.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// Rounds |x| up with probability `random` / 256 of the way.
__device__ __forceinline__ u32 e2m1_from_f32_stochastic(float x, u32 random) {
    const float capped = fminf(fabsf(x), 6.0f);
    const float spacing = capped < 2.0f ? 0.5f : capped < 4.0f ? 1.0f : 2.0f;
    const float moved = __fmaf_rn(float(random) * 0x1p-8f, spacing, capped);
    const float values[7] = {0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    u32 below = 0;
#pragma unroll
    for (u32 i = 0; i < 7; ++i) {
        below += moved >= values[i] ? 1 : 0;
    }
    return is_nan(x) ? 7 : below | (__float_as_uint(x) >> 28 & 8u);
}

__device__ __forceinline__ Scale block_scale(float amax, float whole) {
    if constexpr (FORMAT == MXFP8) {
        return mxfp8_scale(amax);
    } else if constexpr (FORMAT == FP8_BLOCK) {
        return fp8_scale(amax);
    } else {
        return nvfp4_scale(amax, whole);
    }
}

__device__ __forceinline__ void store_scale(float* at, Scale scale) { *at = __uint_as_float(scale.stored); }
__device__ __forceinline__ void store_scale(e4m3* at, Scale scale) { at->bits = u8(scale.stored); }
__device__ __forceinline__ void store_scale(ue8m0* at, Scale scale) { at->bits = u8(scale.stored); }
