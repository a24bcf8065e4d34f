// What the auxiliary loss of routing and its gradient share: NUMERICS.md, "Routing".
//
// Constants: EXPERTS.

// Tokens whose probabilities are added before the sums are.
constexpr u32 TOKEN_BLOCK = 128;

// f_e of `count` out of `choices`.
__device__ __forceinline__ float expert_load(u32 count, u32 choices) {
    return (float(EXPERTS) * float(count)) / float(choices);
}

// The probability of an expert with this score, out of scores with this sum.
__device__ __forceinline__ float share(float score, float sum) {
    return sum == 0.0f ? 1.0f / float(EXPERTS) : score / sum;
}
