// The gradient of the rows of RMSNorm: NUMERICS.md, "Row-wise ops". A warp has a row and reads it twice.

template <bool VECTOR>
__device__ __forceinline__ void grad_row(const Given& given, u64 row, u32 lane) {
    const Params& p = given.params;
    const u64 base = row * p.columns;
    float sum = 0.0f;
#pragma unroll 2
    for (u32 start = lane * RUN; start < p.columns; start += TURN) {
        const u32 n = run_length<VECTOR>(start, p.columns);
        const Run dy = load_run<VECTOR>(given.dy, base + start, n), x = load_run<VECTOR>(given.x, base + start, n);
        const Run weight = load_run<VECTOR>(given.weight, start, n);
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            sum += (dy.at[e] * weight.at[e]) * x.at[e];
        }
    }
    const float c = butterfly(sum) / float(p.columns);
    const float rstd = given.rstd[row];
    const float along = (rstd * rstd) * c;
#pragma unroll 2
    for (u32 start = lane * RUN; start < p.columns; start += TURN) {
        const u32 n = run_length<VECTOR>(start, p.columns);
        const Run dy = load_run<VECTOR>(given.dy, base + start, n), x = load_run<VECTOR>(given.x, base + start, n);
        const Run weight = load_run<VECTOR>(given.weight, start, n);
        Run residual;
        if constexpr (residual_given) {
            residual = load_run<VECTOR>(given.residual, base + start, n);
        }
        Run dx;
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            dx.at[e] = rstd * (dy.at[e] * weight.at[e] - x.at[e] * along);
            if constexpr (residual_given) {
                dx.at[e] += residual.at[e];
            }
        }
        store_run<VECTOR>(given.dx, base + start, n, dx);
    }
}

extern "C" __global__ void __launch_bounds__(128) rms_norm_grad(const __grid_constant__ Given given) {
    begin(given);
    const bool vector = vectors(given.params.columns, given.dy, given.x, given.weight, given.residual, given.dx);
    const u32 lane = lane_id();
    for (u64 row = warp_index(); row < given.params.rows; row += warp_count()) {
        if (vector) {
            grad_row<true>(given, row, lane);
        } else {
            grad_row<false>(given, row, lane);
        }
    }
}
