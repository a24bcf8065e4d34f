// How many choices of a thread block's live with each local expert: the first pass of a stable counting sort.

extern __shared__ u32 counts[];

extern "C" __global__ void __launch_bounds__(THREADS) route_layout_count(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    u32 own[OWN];
    local_experts(given, own);
    count_choices(p.experts, own, counts);
    for (u32 expert = threadIdx.x; expert < p.experts; expert += THREADS) {
        u32 total = 0;
        for (u32 warp = 0; warp < WARPS; ++warp) {
            total += counts[warp * p.experts + expert];
        }
        given.table[u64(expert) * gridDim.x + blockIdx.x] = total;
    }
}
