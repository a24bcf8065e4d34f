// From scores to probabilities: NUMERICS.md, "Attention".

// What a score is multiplied by in the exponent.
__device__ __forceinline__ float exponent_factor(const Scalars& p) {
    return __uint_as_float(p.scale) * __uint_as_float(LOG2_E_BITS);
}

// Whether the product and the difference of an exponent round once.
__device__ __forceinline__ bool fused(float from) { return fabsf(from) < 16777216.0f; }

__device__ __forceinline__ float fused_exponent(float score, float factor, float from) { return __fmaf_rn(score, factor, -from); }

__device__ __forceinline__ float separate_exponent(float score, float factor, float from) { return score * factor - from; }

// The exponent of a score's probability relative to `from`.
__device__ __forceinline__ float exponent(float score, float factor, float from) {
    return fused(from) ? fused_exponent(score, factor, from) : separate_exponent(score, factor, from);
}

// What brings the sums of a row to a larger maximum.
__device__ __forceinline__ float rescale(float before, float largest) {
    return before == -INFINITY_F32 ? 0.0f : f32_ex2(before - largest);
}

// The factor of a row's results; 0 if it sees no key.
__device__ __forceinline__ float reciprocal_of(float largest, float sum) { return largest == -INFINITY_F32 ? 0.0f : 1.0f / sum; }

__device__ __forceinline__ float log_sum(float largest, float sum) {
    return __fmaf_rn(f32_log(sum), __uint_as_float(LOG2_E_BITS), largest);
}
