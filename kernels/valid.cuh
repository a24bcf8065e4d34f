// Padding has no choices.

// Whether a token is none of the padding. By a thread.
__device__ __forceinline__ bool is_valid(const u32* choices, u32 k) {
    bool valid = false;
    for (u32 n = 0; n < k; ++n) {
        valid = valid || choices[n] != NONE;
    }
    return valid;
}
