// The gradient of the queries of attention with bf16 operands on tensor cores. NUMERICS.md, "Attention", backward.
//
// q, d_q [tokens, heads * qk_dim], k [.., kv_heads * qk_dim], v [.., kv_heads * v_dim], d_out [.., heads * v_dim],
// lse, delta [.., heads], start [tokens], first [batch, blocks of 64 rows].
//
// A warpgroup has 64 rows of a head, and holds their chains in registers while the keys go by in blocks of 64, which the
// WARPGROUPS of a thread block share; STAGES of them are in shared memory. QK and V are the heads' elements, padded
// to 16, 32 or a multiple of 64.
//
// Shared memory: q [64 * WARPGROUPS, QK], d_out [64 * WARPGROUPS, V], then STAGES times k [64, QK] and v [64, V].

constexpr u32 THREADS = WARPGROUPS * WARPGROUP;
constexpr u32 ROWS = WARPGROUPS * BLOCK;
constexpr u32 Q_BYTES = tile_bytes(ROWS, QK), D_OUT_BYTES = tile_bytes(ROWS, V);
constexpr u32 K_BYTES = tile_bytes(BLOCK, QK), V_BYTES = tile_bytes(BLOCK, V);

extern __shared__ __align__(1024) u8 shared[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_grad_queries(const __grid_constant__ Given given) {
    begin(given);
    const Params& p = given.params;
    const u32 heads = p.batch * p.heads, row_tiles = (p.sequence + ROWS - 1) / ROWS;
    // The rows that see most come first.
    const u32 row_tile = row_tiles - 1 - blockIdx.x / heads;
    const u32 batch = blockIdx.x % heads / p.heads, head = blockIdx.x % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const u64 token = static_cast<u64>(batch) * p.sequence;

    const u32 warpgroup = threadIdx.x / WARPGROUP;
    const u32 block = row_tile * WARPGROUPS + warpgroup;
    const u32 row = block * BLOCK + threadIdx.x % WARPGROUP / LANES * 16 + lane_id() / 4;
    float lse[2], delta[2];
    u32 start[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const bool there = row + 8 * half < p.sequence;
        const u64 query = (token + row + 8 * half) * p.heads + head;
        lse[half] = there ? given.lse[query] : 0.0f;
        delta[half] = there ? given.delta[query] : 0.0f;
        start[half] = first_key(given.start, token, row + 8 * half, p.sequence);
    }

    const Keys own = keys_of(given.first, batch, p.blocks, block, p.sequence);
    const Keys all = keys_of(given.first, batch, p.blocks, row_tile * WARPGROUPS, p.sequence, WARPGROUPS);

    const u32 q_tile = shared_address(shared), d_out_tile = q_tile + Q_BYTES, key_tiles = d_out_tile + D_OUT_BYTES;
    const bool q_vectors = in_vectors(given.q, p.qk_dim), k_vectors = in_vectors(given.k, p.qk_dim);
    const bool v_vectors = in_vectors(given.v, p.v_dim), d_out_vectors = in_vectors(given.d_out, p.v_dim);
    const auto load_keys = [&](u32 stage, u32 key) {
        const u32 k_tile = key_tiles + stage * (K_BYTES + V_BYTES);
        load_tile<BLOCK, QK, THREADS>(
            k_tile, rows_of(given.k, p.kv_heads, p.qk_dim, token, p.sequence, kv_head, key), k_vectors);
        load_tile<BLOCK, V, THREADS>(
            k_tile + K_BYTES, rows_of(given.v, p.kv_heads, p.v_dim, token, p.sequence, kv_head, key), v_vectors);
        copies_commit();
    };
    load_tile<ROWS, QK, THREADS>(
        q_tile, rows_of(given.q, p.heads, p.qk_dim, token, p.sequence, head, row_tile * ROWS), q_vectors);
    load_tile<ROWS, V, THREADS>(
        d_out_tile, rows_of(given.d_out, p.heads, p.v_dim, token, p.sequence, head, row_tile * ROWS), d_out_vectors);
    if (all.begin < all.end) load_keys(0, all.begin);

    Accumulator<QK> d_q;
    d_q.clear();
    const float scale = __uint_as_float(p.scale);
    u32 stage = 0;
    for (u32 tile = all.begin; tile < all.end; tile += BLOCK) {
        tiles_ready();
        const u32 next = tile + BLOCK;
        if (STAGES > 1 && next < all.end) load_keys(stage ^ 1, next);
        if (own.has(tile)) {
            const u32 k_tile = key_tiles + stage * (K_BYTES + V_BYTES);
            float s[BLOCK / 2], ds[BLOCK / 2];
            products_begin(s, ds);
            multiply_rows<QK, ROWS, BLOCK>(s, q_tile + warpgroup * BLOCK * SPAN * 2, k_tile);
            multiply_rows<V, ROWS, BLOCK>(ds, d_out_tile + warpgroup * BLOCK * SPAN * 2, k_tile + K_BYTES);
            products_done(s, ds);
            bool ordinary = max(start[0], start[1]) <= tile && tile + BLOCK <= row + 1;
#pragma unroll
            for (u32 i = 0; i < BLOCK / 2; i++) {
                s[i] = s[i] * scale - lse[i / 2 % 2];
                ordinary &= exp_is_ordinary(s[i]);
            }
            if (__all_sync(ALL_LANES, ordinary)) {
#pragma unroll
                for (u32 i = 0; i < BLOCK / 2; i++) ds[i] = f32_exp_ordinary(s[i]) * (ds[i] - delta[i / 2 % 2]);
            } else {
#pragma unroll
                for (u32 i = 0; i < BLOCK / 2; i++) {
                    const u32 half = i / 2 % 2, key = tile + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                    const bool seen = visible(key, start[half], row + 8 * half);
                    ds[i] = seen ? f32_exp(s[i]) * (ds[i] - delta[half]) : 0.0f;
                }
            }
            u32 slopes[BLOCK / STEP][4];
#pragma unroll
            for (u32 i = 0; i < BLOCK / 4; i++) slopes[i / 4][i % 4] = bf16_pair(ds[2 * i], ds[2 * i + 1]);
            products_begin(d_q, slopes);
#pragma unroll
            for (u32 i = 0; i < BLOCK / STEP; i++) multiply_step<BLOCK>(d_q, slopes[i], k_tile, i * STEP);
            products_done(d_q);
        }
        if (STAGES == 1) {
            __syncthreads();
            if (next < all.end) load_keys(0, next);
        } else {
            stage ^= 1;
        }
    }

    store_rows<QK>(given.d_q, p.heads, p.qk_dim, token, p.sequence, head, row,
                   [&](u32, u32 piece, u32 i) { return d_q.piece[piece][i] * scale; });
}
