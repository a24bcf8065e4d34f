// RMSNorm: NUMERICS.md, "Row-wise ops". A warp has a row and reads it twice.

template <bool VECTOR>
__device__ __forceinline__ void norm_row(const Given& given, u64 row, u32 lane) {
    const Params& p = given.params;
    const u64 base = row * p.columns;
    float sum = 0.0f;
#pragma unroll 4
    for (u32 start = lane * RUN; start < p.columns; start += TURN) {
        const Run x = load_run<VECTOR>(given.x, base + start, run_length<VECTOR>(start, p.columns));
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            sum += x.at[e] * x.at[e];
        }
    }
    const float mean = butterfly(sum) / float(p.columns);
    const float rstd = 1.0f / sqrtf(mean + __uint_as_float(p.eps));
    if (lane == 0) {
        given.rstd[row] = rstd;
    }
#pragma unroll 4
    for (u32 start = lane * RUN; start < p.columns; start += TURN) {
        const u32 n = run_length<VECTOR>(start, p.columns);
        Run x = load_run<VECTOR>(given.x, base + start, n);
        const Run weight = load_run<VECTOR>(given.weight, start, n);
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            x.at[e] = (x.at[e] * rstd) * weight.at[e];
        }
        store_run<VECTOR>(given.out, base + start, n, x);
    }
}

extern "C" __global__ void __launch_bounds__(128) rms_norm(const __grid_constant__ Given given) {
    begin(given);
    const bool vector = vectors(given.params.columns, given.x, given.weight, given.out);
    const u32 lane = lane_id();
    for (u64 row = warp_index(); row < given.params.rows; row += warp_count()) {
        if (vector) {
            norm_row<true>(given, row, lane);
        } else {
            norm_row<false>(given, row, lane);
        }
    }
}
