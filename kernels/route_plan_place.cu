// The rows of each rank, and where each token went: the last pass of a stable counting sort. `table` has the tokens of
// the thread blocks before, for each rank.

extern "C" __global__ void __launch_bounds__(THREADS) route_plan_place(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    __shared__ u32 counts[WARPS][LANES];
    const u32 token = blockIdx.x * THREADS + threadIdx.x, warp = threadIdx.x / LANES, lane = lane_id();
    for (u32 base = 0; base < p.ranks; base += LANES) {
        const u32 ranks = ranks_of(given, token, base);
        counts[warp][lane] = count_tokens(ranks);
        __syncthreads();
        // The first row of this warp's tokens in the segment of rank base + lane.
        u32 first = 0;
        if (base + lane < p.ranks) {
            first = given.table[u64(base + lane) * gridDim.x + blockIdx.x];
            for (u32 before = 0; before < warp; ++before) {
                first += counts[before][lane];
            }
        }
        for (u32 bit = 0; bit < min(LANES, p.ranks - base); ++bit) {
            const bool goes = ranks >> bit & 1;
            const u32 tokens = __ballot_sync(ALL_LANES, goes);
            const u32 row = __shfl_sync(ALL_LANES, first, bit) + __popc(tokens & ((1u << lane) - 1));
            const u32 place = (base + bit) * p.capacity + row;
            if (goes) {
                given.rows[place] = token;
            }
            if (token < p.tokens) {
                given.positions[u64(token) * p.ranks + base + bit] = goes ? place : NONE;
            }
        }
        __syncthreads();
    }
}
