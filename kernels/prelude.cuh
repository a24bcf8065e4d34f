// What every kernel starts with: number formats, exp and log, and the row reductions of NUMERICS.md.
//
// Compiled without contraction and with correctly rounded division and square root, so that f32 operators mean what
// NUMERICS.md writes; fma is __fmaf_rn and nothing else.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// No row, no slot, no expert.
constexpr u32 NONE = 0xFFFFFFFFu;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;
constexpr u32 INFINITY_BITS = 0x7F800000u;

#define INFINITY_F32 __uint_as_float(INFINITY_BITS)
#define NAN_F32 __uint_as_float(0x7FC00000u)

// The first thing a kernel does: what fails from here on is its failure.
__device__ __forceinline__ void begin(const Given& given) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *static_cast<volatile u32*>(given.begun) = given.launch;
    }
}

// ---- Number formats: NUMERICS.md, "Number formats" ----

__device__ __forceinline__ float to_f32(float x) { return x; }

__device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

// Nearest even; a NaN stays one.
__device__ __forceinline__ u16 bf16_bits(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Two values in one word, the first in the low half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float bf16_round(float x) { return __uint_as_float(u32(bf16_bits(x)) << 16); }

__device__ __forceinline__ float load(const float* x, u64 i) { return x[i]; }

__device__ __forceinline__ float load(const bf16* x, u64 i) { return to_f32(x[i]); }

__device__ __forceinline__ void store(float* x, u64 i, float value) { x[i] = value; }

__device__ __forceinline__ void store(bf16* x, u64 i, float value) { x[i].bits = bf16_bits(value); }

// A magnitude's code in a format with `bits` fraction bits whose exponent bias is `bias` less than that of f32, to nearest
// even. The magnitude is not above the largest finite value.
__device__ __forceinline__ u32 narrow(u32 magnitude, u32 bits, u32 bias) {
    u32 field = magnitude >> 23;
    u32 significand = (magnitude & 0x7FFFFFu) | (field != 0 ? 0x800000u : 0u);
    u32 least = bias + 1;
    u32 at = max(field, least);
    u32 down = min(23 - bits + at - field, 31u);
    u32 rounded = (significand + (1u << (down - 1)) - 1 + ((significand >> down) & 1)) >> down;
    // The leading one adds itself to the field.
    return ((at - least) << bits) + rounded;
}

__device__ __forceinline__ bool is_nan(float x) { return x != x; }

// Saturating; NaN gives 0x7F.
__device__ __forceinline__ u8 e4m3_from_f32(float x) {
    u32 bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu;
    u32 code = narrow(min(magnitude, 0x43E00000u), 3, 120) | ((bits >> 24) & 0x80u);
    return u8(magnitude > INFINITY_BITS ? 0x7Fu : code);
}

__device__ __forceinline__ float e4m3_to_f32(u8 code) {
    u32 magnitude = code & 0x7Fu;
    // The bits as a float 2^-120 too small; the product is exact, subnormals included.
    float value = __uint_as_float(magnitude << 20) * __uint_as_float((127u + 120u) << 23);
    value = magnitude == 0x7Fu ? NAN_F32 : value;
    return __uint_as_float(__float_as_uint(value) | (u32(code & 0x80u) << 24));
}

__device__ __forceinline__ float to_f32(e4m3 x) { return e4m3_to_f32(x.bits); }

// Saturating; NaN gives +6.
__device__ __forceinline__ u8 e2m1_from_f32(float x) {
    u32 bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu;
    u32 code = narrow(min(magnitude, 0x40C00000u), 1, 126) | ((bits >> 28) & 8u);
    return u8(magnitude > INFINITY_BITS ? 7u : code);
}

__device__ __forceinline__ float ue8m0_to_f32(u8 code) {
    return __uint_as_float(code == 0xFFu ? 0x7FC00000u : code == 0 ? 0x00400000u : u32(code) << 23);
}

// 1 over the value of a code, exactly.
__device__ __forceinline__ float ue8m0_reciprocal(u8 code) {
    return code == 0xFFu ? NAN_F32 : ue8m0_to_f32(u8(254 - code));
}

// The least power of two that is not below |x|.
__device__ __forceinline__ u8 ue8m0_from_f32(float x) {
    u32 bits = __float_as_uint(x) & 0x7FFFFFFFu;
    bool above = bits < 0x800000u ? bits > 0x400000u : (bits & 0x7FFFFFu) != 0;
    return u8(bits > INFINITY_BITS ? 0xFFu : min((bits >> 23) + (above ? 1u : 0u), 254u));
}

// The largest power of two that is not above |x|.
__device__ __forceinline__ u8 ue8m0_from_f32_floor(float x) {
    u32 bits = __float_as_uint(x) & 0x7FFFFFFFu;
    return u8(bits > INFINITY_BITS ? 0xFFu : min(bits >> 23, 254u));
}

// ---- The special-function unit: NUMERICS.md, "ex2 and rcp" ----

__device__ __forceinline__ float f32_ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- exp and log: NUMERICS.md, "exp and log" ----

__device__ __forceinline__ float power_of_two(i32 n) { return __uint_as_float(u32(n + 127) << 23); }

// e^x over a power of two: that of the integer in which the bits of `shifted` end.
__device__ __forceinline__ float exp_fraction(float x, float& shifted) {
    const float round = 12582912.0f;
    shifted = __fmaf_rn(x, __uint_as_float(0x3FB8AA3Bu), round);
    float n = shifted - round;
    float r = __fmaf_rn(-__uint_as_float(0x35BFBE8Eu), n, __fmaf_rn(-__uint_as_float(0x3F317200u), n, x));
    float q = __uint_as_float(0x3AB54E89u);
    q = __fmaf_rn(q, r, __uint_as_float(0x3C091EECu));
    q = __fmaf_rn(q, r, __uint_as_float(0x3D2AAC2Cu));
    q = __fmaf_rn(q, r, __uint_as_float(0x3E2AAA46u));
    q = __fmaf_rn(q, r, __uint_as_float(0x3EFFFFFEu));
    float sum = 1.0f + r;
    float lost = r - (sum - 1.0f);
    return sum + __fmaf_rn(q, r * r, lost);
}

__device__ __forceinline__ float f32_exp(float x) {
    // Beyond these the result is infinity or zero. A NaN passes through both comparisons.
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    float shifted;
    float p = exp_fraction(x, shifted);
    // A NaN's bits mean no number; p is NaN then, whatever it is scaled by.
    i32 exponent = __float_as_int(shifted) - __float_as_int(12582912.0f);
    i32 half = exponent >> 1;
    return p * power_of_two(half) * power_of_two(exponent - half);
}

// Where neither the argument nor the result of exp is out of the ordinary: no NaN, no subnormal, no infinity.
__device__ __forceinline__ bool exp_is_ordinary(float x) { return fabsf(x) <= 86.0f; }

// The same there in fewer instructions: the power of two is added to the exponent.
__device__ __forceinline__ float f32_exp_ordinary(float x) {
    float shifted;
    float p = exp_fraction(x, shifted);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

__device__ __forceinline__ float f32_log(float x) {
    const u32 sqrt_half = 0x3F3504F3u;
    bool subnormal = x < __uint_as_float(0x00800000u);
    float scaled = subnormal ? x * power_of_two(23) : x;
    u32 bits = __float_as_uint(scaled) - sqrt_half;
    float n = float((i32(bits) >> 23) - (subnormal ? 23 : 0));
    float f = __uint_as_float((bits & 0x007FFFFFu) + sqrt_half) - 1.0f;
    float p = __uint_as_float(0x3D2CC40Du);
    p = __fmaf_rn(p, f, __uint_as_float(0xBDD38F6Fu));
    p = __fmaf_rn(p, f, __uint_as_float(0x3DFBE719u));
    p = __fmaf_rn(p, f, __uint_as_float(0xBE01ABC0u));
    p = __fmaf_rn(p, f, __uint_as_float(0x3E1164D3u));
    p = __fmaf_rn(p, f, __uint_as_float(0xBE2A8542u));
    p = __fmaf_rn(p, f, __uint_as_float(0x3E4CD358u));
    p = __fmaf_rn(p, f, __uint_as_float(0xBE800064u));
    p = __fmaf_rn(p, f, __uint_as_float(0x3EAAAAA3u));
    float square = f * f;
    float small = __fmaf_rn(__uint_as_float(0x35BFBE8Eu), n, __fmaf_rn(square * f, p, -0.5f * square));
    float large = __uint_as_float(0x3F317200u) * n;
    float sum = large + f;
    float lost = f - (sum - large);
    float value = sum + (lost + small);
    value = x == INFINITY_F32 ? x : value;
    value = x == 0.0f ? -INFINITY_F32 : value;
    // True for a negative x and for NaN.
    return x >= 0.0f ? value : NAN_F32;
}

__device__ __forceinline__ float f32_sigmoid(float x) { return 1.0f / (1.0f + f32_exp(-x)); }

__device__ __forceinline__ float f32_silu(float x) { return x / (1.0f + f32_exp(-x)); }

// ---- Row reductions: NUMERICS.md, "Sums". A warp has a row; 8 consecutive elements belong to a lane. ----

constexpr u32 LANES = 32;
constexpr u32 RUN = 8;
constexpr u32 TURN = LANES * RUN;

__device__ __forceinline__ u32 lane_id() { return threadIdx.x % LANES; }

// The sum of the lanes' values, in every lane.
__device__ __forceinline__ float butterfly(float value) {
#pragma unroll
    for (u32 width = LANES / 2; width > 0; width /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, width);
    }
    return value;
}

// The row reduction of term(0) .. term(count - 1), by a whole warp; in every lane.
template <typename Term>
__device__ __forceinline__ float row_sum(u32 count, Term term) {
    float sum = 0.0f;
    for (u64 start = lane_id() * RUN; start < count; start += TURN) {
#pragma unroll
        for (u32 i = 0; i < RUN; ++i) {
            if (start + i < count) {
                sum += term(u32(start + i));
            }
        }
    }
    return butterfly(sum);
}

// The larger one; a NaN is ignored if it comes second.
__device__ __forceinline__ float larger(float a, float b) { return b > a ? b : a; }

// The largest of the lanes' values, in every lane. None is NaN.
__device__ __forceinline__ float largest_lane(float value) {
#pragma unroll
    for (u32 width = LANES / 2; width > 0; width /= 2) {
        value = larger(value, __shfl_xor_sync(ALL_LANES, value, width));
    }
    return value;
}

// The largest of term(0) .. term(count - 1), by a whole warp; in every lane. NaN does not count; none: -infinity.
template <typename Term>
__device__ __forceinline__ float row_max(u32 count, Term term) {
    float most = -INFINITY_F32;
    for (u64 i = lane_id(); i < count; i += LANES) {
        most = larger(most, term(u32(i)));
    }
    return largest_lane(most);
}
