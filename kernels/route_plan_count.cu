// How many tokens of a thread block's go to each rank: the first pass of a stable counting sort.

extern "C" __global__ void __launch_bounds__(THREADS) route_plan_count(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    __shared__ u32 counts[WARPS][LANES];
    for (u32 base = 0; base < p.ranks; base += LANES) {
        const u32 ranks = ranks_of(given, blockIdx.x * THREADS + threadIdx.x, base);
        counts[threadIdx.x / LANES][lane_id()] = count_tokens(ranks);
        __syncthreads();
        const u32 rank = base + threadIdx.x;
        if (threadIdx.x < LANES && rank < p.ranks) {
            u32 total = 0;
            for (u32 warp = 0; warp < WARPS; ++warp) {
                total += counts[warp][threadIdx.x];
            }
            given.table[u64(rank) * gridDim.x + blockIdx.x] = total;
        }
        __syncthreads();
    }
}
