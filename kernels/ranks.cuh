// Which ranks a token goes to: NUMERICS.md, "Mixture-of-Experts layer". 32 ranks at a time; a thread has a token.

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / LANES;

// A bit for each of the ranks base .. base + 31 that own one of the token's experts. An id that is none of the experts
// belongs to no rank.
__device__ __forceinline__ u32 ranks_of(const Given& given, u32 token, u32 base) {
    const Scalars& p = given.scalars;
    const u32 phase = token % p.window_period;
    u32 ranks = 0;
    if (token < p.tokens && phase >= p.window_begin && phase < p.window_end) {
        for (u32 n = 0; n < p.k; ++n) {
            const u32 id = given.ids[u64(token) * p.k + n];
            const u32 bit = id / p.rank_experts - base;
            ranks |= bit < min(LANES, p.ranks - base) ? 1u << bit : 0;
        }
    }
    return ranks;
}

// How many of the warp's tokens go to rank base + lane.
__device__ __forceinline__ u32 count_tokens(u32 ranks) {
    u32 own = 0;
#pragma unroll
    for (u32 bit = 0; bit < 32; ++bit) {
        const u32 tokens = __ballot_sync(ALL_LANES, ranks >> bit & 1);
        own = lane_id() == bit ? __popc(tokens) : own;
    }
    return own;
}
