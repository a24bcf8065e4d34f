// The gradient of the queries of attention in chains of f32 fma. NUMERICS.md, "Attention", backward. A warp has a row of a
// head.
//
// q, d_q [tokens, heads * qk_dim], k [.., kv_heads * qk_dim], v [.., kv_heads * v_dim], d_out [.., heads * v_dim],
// lse, delta [.., heads], start [tokens], first [batch, blocks of 64 rows].
//
// Shared memory of a warp: gradients of scores [128], q [qk_dim], d_out [v_dim], d_q [qk_dim].

extern "C" __global__ void __launch_bounds__(WARPS * LANES) attention_f32_grad_queries(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 warp = threadIdx.x / LANES, lane = lane_id();
    const u64 i = static_cast<u64>(blockIdx.x) * WARPS + warp;
    const u32 row = i % p.sequence, head = i / p.sequence % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const u64 batch = i / p.sequence / p.heads, token = batch * p.sequence, query = (token + row) * p.heads + head;
    if (batch >= p.batch) return;
    const auto key_of = [&](u32 key) { return (token + key) * p.kv_heads + kv_head; };

    float* slopes = shared + warp * (KEY_TILE + 2 * p.qk_dim + p.v_dim);
    float *q = slopes + KEY_TILE, *d_out = q + p.qk_dim, *d_q = d_out + p.v_dim;
    load_row(q, given.q, query * p.qk_dim, p.qk_dim);
    load_row(d_out, given.d_out, query * p.v_dim, p.v_dim);
    clear_row(d_q, p.qk_dim);

    const float scale = __uint_as_float(p.scale), factor = exponent_factor(p);
    const float lse = given.lse[query], delta = given.delta[query];
    const u32 start = first_key(given.start, token, row, p.sequence);
    const Keys keys = keys_of(given.first, batch, p.blocks, row / BLOCK, p.sequence);
    for (u32 tile = keys.begin; tile < keys.end; tile += KEY_TILE) {
        const u32 count = min(KEY_TILE, keys.end - tile);
        const auto seen = [&](u32 c) { return visible(tile + c, start, row); };
        __syncwarp();
        for (u32 c = lane; c < count; c += LANES) {
            float slope = 0.0f;
            if (seen(c)) {
                const float score = chain(q, given.k, key_of(tile + c) * p.qk_dim, p.qk_dim);
                const float dp = chain(d_out, given.v, key_of(tile + c) * p.v_dim, p.v_dim);
                slope = f32_ex2(exponent(score, factor, lse)) * (dp - delta);
            }
            slopes[c] = round_like(given.k, slope);
        }
        __syncwarp();
        continue_chains(d_q, 1.0f, slopes, count, seen, given.k, key_of(tile) * p.qk_dim,
                        static_cast<u64>(p.kv_heads) * p.qk_dim, p.qk_dim);
    }
    for (u32 c = lane; c < p.qk_dim; c += LANES) store(given.d_q, query * p.qk_dim + c, end_of(d_q[c]) * scale);
}
