// RMSNorm: NUMERICS.md, "Row-wise ops". A warp has a row and reads it twice.

template <bool VECTOR>
__device__ __forceinline__ void norm_row(const Given& given, u64 row, u32 lane) {
    const Scalars& p = given.scalars;
    const u64 base = row * p.columns;
    float sum = 0.0f;
    const auto load_x = [&](u64 start) {
        return load_run<VECTOR>(given.x, base + start, run_length<VECTOR>(start, p.columns));
    };
    in_groups<4>(lane * RUN, p.columns, TURN, load_x, [&](u64, const Run& x) {
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            sum += x.at[e] * x.at[e];
        }
    });
    const float mean = butterfly(sum) / float(p.columns);
    const float rstd = 1.0f / sqrtf(mean + __uint_as_float(p.eps));
    if (lane == 0) {
        given.rstd[row] = rstd;
    }
    in_groups<4>(lane * RUN, p.columns, TURN, load_x, [&](u64 start, const Run& x) {
        const u32 n = run_length<VECTOR>(start, p.columns);
        const Run weight = load_run<VECTOR>(given.weight, start, n);
        Run out;
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            out.at[e] = (x.at[e] * rstd) * weight.at[e];
        }
        store_run<VECTOR>(given.out, base + start, n, out);
    });
}

extern "C" __global__ void __launch_bounds__(128) rms_norm(const __grid_constant__ Given given) {
    begin(given);
    const bool vector = vectors(given.scalars.columns, given.x, given.weight, given.out);
    const u32 lane = lane_id();
    for (u64 row = warp_index(); row < given.scalars.rows; row += warp_count()) {
        if (vector) {
            norm_row<true>(given, row, lane);
        } else {
            norm_row<false>(given, row, lane);
        }
    }
}
