// The gradients of keys and values of attention in chains of f32 fma. NUMERICS.md, "Attention", backward. A warp has a key
// of a key head, to which the rows of its query heads come 32 at a time.
//
// q [tokens, heads * qk_dim], k, d_k [.., kv_heads * qk_dim], v, d_v [.., kv_heads * v_dim], d_out [.., heads * v_dim],
// lse, delta [.., heads], start [tokens], first [batch, blocks of 64 rows].
//
// Shared memory of a warp: probabilities and gradients of scores [32] each, k, d_k [qk_dim] each, v, d_v [v_dim] each.

extern "C" __global__ void __launch_bounds__(WARPS * LANES) attention_f32_grad_keys(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 warp = threadIdx.x / LANES, lane = lane_id();
    const u64 i = static_cast<u64>(blockIdx.x) * WARPS + warp;
    const u32 key = i % p.sequence, kv_head = i / p.sequence % p.kv_heads, members = p.heads / p.kv_heads;
    const u64 batch = i / p.sequence / p.kv_heads, token = batch * p.sequence, place = (token + key) * p.kv_heads + kv_head;
    if (batch >= p.batch) return;

    float* probabilities = shared + warp * (2 * LANES + 2 * p.qk_dim + 2 * p.v_dim);
    float *slopes = probabilities + LANES, *k = slopes + LANES, *d_k = k + p.qk_dim, *v = d_k + p.qk_dim, *d_v = v + p.v_dim;
    load_row(k, given.k, place * p.qk_dim, p.qk_dim);
    load_row(v, given.v, place * p.v_dim, p.v_dim);
    clear_row(d_k, p.qk_dim);
    clear_row(d_v, p.v_dim);

    const float scale = __uint_as_float(p.scale), factor = exponent_factor(p);
    for (u32 head = kv_head * members; head < (kv_head + 1) * members; head++) {
        const auto query_of = [&](u32 row) { return (token + row) * p.heads + head; };
        for (u32 base = key / BLOCK * BLOCK; base < p.sequence; base += LANES) {
            // Blocks that go past this key's tile have no term of its chains.
            if (first_tile(given.first, batch, p.blocks, base / BLOCK) > key) continue;
            const u32 count = min(LANES, p.sequence - base), row = base + lane;
            float probability = 0.0f, slope = 0.0f;
            const bool sees = visible(key, first_key(given.start, token, row, p.sequence), row);
            const u32 seeing = __ballot_sync(ALL_LANES, sees);
            const auto seen = [&](u32 j) { return (seeing >> j & 1) != 0; };
            __syncwarp();
            if (sees) {
                const u64 query = query_of(row);
                probability = f32_ex2(exponent(chain(k, given.q, query * p.qk_dim, p.qk_dim), factor, given.lse[query]));
                slope = probability * (chain(v, given.d_out, query * p.v_dim, p.v_dim) - given.delta[query]);
            }
            probabilities[lane] = round_like(given.q, probability);
            slopes[lane] = round_like(given.q, slope);
            __syncwarp();
            continue_chains(d_v, 1.0f, probabilities, count, seen, given.d_out, query_of(base) * p.v_dim,
                            static_cast<u64>(p.heads) * p.v_dim, p.v_dim);
            continue_chains(d_k, 1.0f, slopes, count, seen, given.q, query_of(base) * p.qk_dim,
                            static_cast<u64>(p.heads) * p.qk_dim, p.qk_dim);
        }
    }
    for (u32 c = lane; c < p.qk_dim; c += LANES) store(given.d_k, place * p.qk_dim + c, end_of(d_k[c]) * scale);
    for (u32 c = lane; c < p.v_dim; c += LANES) store(given.d_v, place * p.v_dim + c, end_of(d_v[c]));
}
