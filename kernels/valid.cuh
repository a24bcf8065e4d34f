// Padding has no choices.

// Whether a token is none of the padding: one of its choices is an expert. By a thread.
__device__ __forceinline__ bool is_valid(const u32* choices, u32 k, u32 experts) {
    bool valid = false;
    for (u32 n = 0; n < k; ++n) {
        valid = valid || choices[n] < experts;
    }
    return valid;
}
