// The row reduction of squares: NUMERICS.md, "Sums". A warp has a row.

template <bool VECTOR>
__device__ __forceinline__ float sum_row(const Given& given, u64 row, u32 lane) {
    const u32 columns = given.scalars.columns;
    float sum = 0.0f;
    const auto load_x = [&](u64 start) {
        return load_run<VECTOR>(given.x, row * columns + start, run_length<VECTOR>(start, columns));
    };
    in_groups<4>(lane * RUN, columns, TURN, load_x, [&](u64, const Run& x) {
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            sum += x.at[e] * x.at[e];
        }
    });
    return butterfly(sum);
}

extern "C" __global__ void __launch_bounds__(128) sum_squares(const __grid_constant__ Given given) {
    begin(given);
    const bool vector = vectors(given.scalars.columns, given.x);
    const u32 lane = lane_id();
    for (u64 row = warp_index(); row < given.scalars.rows; row += warp_count()) {
        const float sum = vector ? sum_row<true>(given, row, lane) : sum_row<false>(given, row, lane);
        if (lane == 0) {
            given.out[row] = sum;
        }
    }
}
