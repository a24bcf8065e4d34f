// The gradient of the rows of RMSNorm: NUMERICS.md, "Row-wise ops". A warp has a row and reads it twice.

struct Operands {
    Run dy, x;
};

template <bool VECTOR>
__device__ __forceinline__ void grad_row(const Given& given, u64 row, u32 lane) {
    const Scalars& p = given.scalars;
    const u64 base = row * p.columns;
    float sum = 0.0f;
    const auto load_both = [&](u64 start) {
        const u32 n = run_length<VECTOR>(start, p.columns);
        return Operands{load_run<VECTOR>(given.dy, base + start, n), load_run<VECTOR>(given.x, base + start, n)};
    };
    in_groups<2>(lane * RUN, p.columns, TURN, load_both, [&](u64 start, const Operands& at) {
        const Run weight = load_run<VECTOR>(given.weight, start, run_length<VECTOR>(start, p.columns));
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            sum += (at.dy.at[e] * weight.at[e]) * at.x.at[e];
        }
    });
    const float c = butterfly(sum) / float(p.columns);
    const float rstd = given.rstd[row];
    const float along = (rstd * rstd) * c;
    in_groups<2>(lane * RUN, p.columns, TURN, load_both, [&](u64 start, const Operands& at) {
        const u32 n = run_length<VECTOR>(start, p.columns);
        const Run weight = load_run<VECTOR>(given.weight, start, n);
        Run residual;
        if constexpr (residual_given) {
            residual = load_run<VECTOR>(given.residual, base + start, n);
        }
        Run dx;
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            dx.at[e] = rstd * (at.dy.at[e] * weight.at[e] - at.x.at[e] * along);
            if constexpr (residual_given) {
                dx.at[e] += residual.at[e];
            }
        }
        store_run<VECTOR>(given.dx, base + start, n, dx);
    });
}

extern "C" __global__ void __launch_bounds__(128) rms_norm_grad(const __grid_constant__ Given given) {
    begin(given);
    const bool vector = vectors(given.scalars.columns, given.dy, given.x, given.weight, given.residual, given.dx);
    const u32 lane = lane_id();
    for (u64 row = warp_index(); row < given.scalars.rows; row += warp_count()) {
        if (vector) {
            grad_row<true>(given, row, lane);
        } else {
            grad_row<false>(given, row, lane);
        }
    }
}
