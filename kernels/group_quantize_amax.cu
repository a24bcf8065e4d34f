// The amax of a tensor, of the rows within its groups: NUMERICS.md, "Block formats". The result begins as zero; an
// integer maximum of magnitudes does not depend on the order.

extern "C" __global__ void __launch_bounds__(256) group_quantize_amax(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    u32 rows = p.rows;
    if constexpr (offsets_given) {
        rows = min(rows, given.offsets[p.groups]);
    }
    const u64 elements = u64(rows) * p.columns;
    // Whole runs, and what is left.
    const u64 runs = vectors(0, given.x) ? elements / RUN : 0;
    const u64 first = thread_index(), step = u64(gridDim.x) * blockDim.x;
    float amax = 0.0f;
#pragma unroll 4
    for (u64 i = first; i < runs; i += step) {
        const Run x = load_run<true>(given.x, i * RUN, RUN);
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            amax = fmaxf(amax, fabsf(x.at[e]));
        }
    }
    for (u64 i = runs * RUN + first; i < elements; i += step) {
        amax = fmaxf(amax, fabsf(load(given.x, i)));
    }

    __shared__ u32 largest;
    if (threadIdx.x == 0) {
        largest = 0;
    }
    __syncthreads();
    const u32 of_warp = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(amax));
    if (threadIdx.x % 32 == 0) {
        atomicMax(&largest, of_warp);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicMax(reinterpret_cast<u32*>(given.amax), largest);
    }
}
