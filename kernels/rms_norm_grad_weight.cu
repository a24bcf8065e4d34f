// The gradient of the weight of RMSNorm over blocks of 128 rows: NUMERICS.md, "Row-wise ops". A thread has a run of
// columns of a block.

template <bool VECTOR>
__device__ __forceinline__ void sum_block(const Given& given, Place place) {
    const Scalars& p = given.scalars;
    const u32 n = run_length<VECTOR>(place.column, p.columns);
    const Run sum = block_sum(token_block(place.row, p.group_rows), [&](u64 row) {
        const u64 i = row * p.columns + place.column;
        Run term = load_run<VECTOR>(given.dy, i, n);
        const Run x = load_run<VECTOR>(given.x, i, n);
        const float rstd = given.rstd[row];
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            term.at[e] *= x.at[e] * rstd;
        }
        return term;
    });
    store_run<VECTOR>(given.sums, place.row * p.columns + place.column, n, sum);
}

extern "C" __global__ void __launch_bounds__(128) rms_norm_grad_weight(const __grid_constant__ Given given) {
    begin(given);
    const Place place = place_of(thread_index(), given.scalars.columns);
    if (place.row >= given.scalars.blocks) {
        return;
    }
    if (vectors(given.scalars.columns, given.dy, given.x, given.sums)) {
        sum_block<true>(given, place);
    } else {
        sum_block<false>(given, place);
    }
}
