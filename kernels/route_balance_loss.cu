// The sequence-wise auxiliary loss: NUMERICS.md, "Routing". A thread block has a sequence.
//
// Constants: EXPERTS.

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) route_balance_loss(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    __shared__ float terms[EXPERTS];
    const u32 sequence = blockIdx.x, valid = given.valid[sequence];
    for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) {
        float total = 0.0f;
        for (u32 block = 0; block < p.blocks; ++block) {
            total += given.sums[(u64(sequence) * p.blocks + block) * EXPERTS + e];
        }
        const u32 count = given.counts[u64(sequence) * EXPERTS + e];
        terms[e] = expert_load(count, p.k * valid) * (total / float(valid));
    }
    __syncthreads();
    if (threadIdx.x < LANES) {
        const float sum = row_sum(EXPERTS, [&](u32 e) { return terms[e]; });
        if (threadIdx.x == 0) {
            given.loss[sequence] = valid == 0 ? 0.0f : __uint_as_float(p.coefficient) * sum;
        }
    }
}
