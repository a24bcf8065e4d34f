// Choices of each expert, and the sums of the tokens' probabilities: NUMERICS.md, "Routing". A thread block has a block
// of tokens of a sequence: a warp adds the scores of a token, then a thread the probabilities of an expert.
//
// Constants: EXPERTS.

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) route_balance_blocks(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    __shared__ float sums[TOKEN_BLOCK];
    __shared__ u32 counts[EXPERTS];
    const u32 sequence = blockIdx.x / p.blocks, begin = blockIdx.x % p.blocks * TOKEN_BLOCK;
    const u32 tokens = min(TOKEN_BLOCK, p.tokens - begin);
    const u64 first = u64(sequence) * p.tokens + begin;
    const u32* ids = given.ids + first * p.k;
    const float* scores = given.scores + first * EXPERTS;
    for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) {
        counts[e] = 0;
    }
    for (u32 t = threadIdx.x / LANES; t < tokens; t += THREADS / LANES) {
        float score[OWN];
        load_experts(scores + u64(t) * EXPERTS, score);
        const float sum = sum_experts(score);
        if (lane_id() == 0) {
            sums[t] = sum;
        }
    }
    const bool valid = threadIdx.x < tokens && is_valid(ids + threadIdx.x * p.k, p.k, EXPERTS);
    const u32 valid_tokens = __syncthreads_count(valid);
    for (u32 i = threadIdx.x; i < tokens * p.k; i += THREADS) {
        if (ids[i] < EXPERTS) {
            atomicAdd(&counts[ids[i]], 1);
        }
    }
    if (threadIdx.x == 0) {
        atomicAdd(given.valid + sequence, valid_tokens);
    }
    __shared__ bool takes_part[TOKEN_BLOCK];
    if (threadIdx.x < TOKEN_BLOCK) {
        takes_part[threadIdx.x] = valid;
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) {
        float sum = 0.0f;
        for (u32 t = 0; t < tokens; ++t) {
            if (takes_part[t]) {
                sum += share(scores[u64(t) * EXPERTS + e], sums[t]);
            }
        }
        given.sums[u64(blockIdx.x) * EXPERTS + e] = sum;
        if (counts[e] > 0) {
            atomicAdd(given.counts + (u64(sequence) * EXPERTS + e), counts[e]);
        }
    }
}
