// Causal softmax attention in chains of f32 fma. NUMERICS.md, "Attention", forward. A warp has a row of a head.
//
// q [tokens, heads * qk_dim], k [.., kv_heads * qk_dim], v [.., kv_heads * v_dim], out [.., heads * v_dim], lse [.., heads],
// start [tokens], first [batch, blocks of 64 rows].
//
// Shared memory of a warp: probabilities [128], q [qk_dim], result [v_dim].

extern "C" __global__ void __launch_bounds__(WARPS * LANES) attention_f32_forward(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 warp = threadIdx.x / LANES, lane = lane_id();
    const u64 i = static_cast<u64>(blockIdx.x) * WARPS + warp;
    const u32 row = i % p.sequence, head = i / p.sequence % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const u64 batch = i / p.sequence / p.heads, token = batch * p.sequence, query = (token + row) * p.heads + head;
    if (batch >= p.batch) return;
    const auto key_of = [&](u32 key) { return (token + key) * p.kv_heads + kv_head; };

    float* probabilities = shared + warp * (KEY_TILE + p.qk_dim + p.v_dim);
    float *q = probabilities + KEY_TILE, *o = q + p.qk_dim;
    load_row(q, given.q, query * p.qk_dim, p.qk_dim);
    clear_row(o, p.v_dim);

    const float factor = exponent_factor(p);
    const u32 start = first_key(given.start, token, row, p.sequence);
    const Keys keys = keys_of(given.first, batch, p.blocks, row / BLOCK, p.sequence);
    float largest = -INFINITY_F32, sum = 0.0f;
    for (u32 tile = keys.begin; tile < keys.end; tile += KEY_TILE) {
        const u32 count = min(KEY_TILE, keys.end - tile);
        const auto seen = [&](u32 c) { return visible(tile + c, start, row); };
        __syncwarp();
        float highest = -INFINITY_F32;
        for (u32 c = lane; c < count; c += LANES) {
            if (!seen(c)) continue;
            probabilities[c] = chain(q, given.k, key_of(tile + c) * p.qk_dim, p.qk_dim);
            highest = larger(highest, probabilities[c]);
        }
        highest = larger(largest, largest_lane(highest) * factor);
        for (u32 c = lane; c < count; c += LANES) {
            probabilities[c] = seen(c) ? f32_ex2(exponent(probabilities[c], factor, highest)) : 0.0f;
        }
        __syncwarp();

        float alpha = 1.0f;
        if (max(start, tile) < min(row + 1, tile + count)) {
            // The sum's four lanes; the others of this warp do the same.
            float part = 0.0f;
            for (u32 c = lane % 4 * 2; c < count; c += 8) {
                part += probabilities[c];
                if (c + 1 < count) part += probabilities[c + 1];
            }
            part += __shfl_xor_sync(ALL_LANES, part, 1);
            part += __shfl_xor_sync(ALL_LANES, part, 2);
            alpha = rescale(largest, highest);
            sum = sum * alpha + part;
            largest = highest;
        }
        __syncwarp();
        for (u32 c = lane; c < count; c += LANES) probabilities[c] = round_like(given.v, probabilities[c]);
        __syncwarp();
        continue_chains(o, alpha, probabilities, count, seen, given.v, key_of(tile) * p.v_dim,
                        static_cast<u64>(p.kv_heads) * p.v_dim, p.v_dim);
    }

    const float reciprocal = reciprocal_of(largest, sum);
    for (u32 c = lane; c < p.v_dim; c += LANES) store(given.out, query * p.v_dim + c, end_of(o[c]) * reciprocal);
    if (lane == 0) given.lse[query] = log_sum(largest, sum);
}
