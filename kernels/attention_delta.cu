// delta, the row reduction of d_out * out: NUMERICS.md, "Attention", backward. A warp has a head of a row.
//
// d_out, out [tokens, heads * v_dim], delta [tokens, heads].

extern "C" __global__ void __launch_bounds__(WARPS * LANES) attention_delta(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u64 row = static_cast<u64>(blockIdx.x) * WARPS + threadIdx.x / LANES;
    if (row >= static_cast<u64>(p.batch) * p.sequence * p.heads) return;
    const u64 first = row * p.v_dim;
    const float delta =
        row_sum(p.v_dim, [&](u32 i) { return load(given.d_out, first + i) * load(given.out, first + i); });
    if (lane_id() == 0) given.delta[row] = delta;
}
