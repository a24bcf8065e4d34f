// The amax of a tensor, of the rows within its groups: NUMERICS.md, "Block formats". The result begins as zero; an
// integer maximum of magnitudes does not depend on the order.

extern "C" __global__ void __launch_bounds__(256) group_quantize_amax(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    u32 rows = p.rows;
    if constexpr (offsets_given) {
        rows = min(rows, given.offsets[p.groups]);
    }
    // Runs of a row, whole or short; a gathered row that is not there is +0.
    const u64 runs = u64(rows) * runs_of(p.columns);
    const bool vector = vectors(p.columns, given.x);
    float amax = 0.0f;
#pragma unroll 4
    for (u64 i = thread_index(); i < runs; i += thread_count()) {
        const Place place = place_of(i, p.columns);
        u64 source = place.row;
        if constexpr (gather_given) {
            source = given.gather[source];
            if (source >= p.sources) continue;
        }
        const u64 at = source * p.columns + place.column;
        const Run x = vector ? load_run<true>(given.x, at, RUN)
                             : load_run<false>(given.x, at, run_length<false>(place.column, p.columns));
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            amax = fmaxf(amax, fabsf(x.at[e]));
        }
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
