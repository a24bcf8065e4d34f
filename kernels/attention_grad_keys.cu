// The gradients of keys and values of attention with bf16 operands on tensor cores. NUMERICS.md, "Attention", backward.
//
// q, d_q [tokens, heads * qk_dim], k, d_k [.., kv_heads * qk_dim], v, d_v [.., kv_heads * v_dim],
// d_out [.., heads * v_dim], lse, delta [.., heads], start [tokens], first [batch, blocks of 64 rows].
//
// A warpgroup has 64 keys of a key head, and holds their chains in registers while the rows of the query heads go by in
// blocks of 64. Scores are computed transposed, so that they are the left factor of the second products as they lie
// in registers, HALF rows at a time to leave room for the chains. The WARPGROUPS of a thread block share the rows, of
// which STAGES blocks are in shared memory. QK and V are the heads' elements, padded to 16, 32 or a multiple of 64.
// GRAD_KEYS, GRAD_VALUES: which of the two results a launch computes; large heads need one for each.
//
// Shared memory: k [64 * WARPGROUPS, QK], v [64 * WARPGROUPS, V]; STAGES times q [64, QK], d_out [64, V]; STAGES times
// lse, delta and start of 64 rows.

constexpr u32 HALF = BLOCK / 2;
constexpr u32 THREADS = WARPGROUPS * WARPGROUP;
constexpr u32 KEYS = WARPGROUPS * BLOCK;
constexpr u32 K_BYTES = tile_bytes(KEYS, QK), V_BYTES = tile_bytes(KEYS, V);
constexpr u32 Q_BYTES = tile_bytes(BLOCK, QK), D_OUT_BYTES = tile_bytes(BLOCK, V);

extern __shared__ __align__(1024) u8 shared[];

// What the scores of a block of rows need to become probabilities and their gradients.
struct RowFacts {
    float lse[BLOCK], delta[BLOCK];
    u32 start[BLOCK];
};

// A block of rows of one of the query heads that share the key head.
struct Place {
    u32 member, block;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_grad_keys(const __grid_constant__ Given given) {
    begin(given);
    const Params& p = given.params;
    const u32 pairs = p.batch * p.kv_heads, members = p.heads / p.kv_heads;
    // The keys that most rows see come first.
    const u32 key_tile = blockIdx.x / pairs, batch = blockIdx.x % pairs / p.kv_heads, kv_head = blockIdx.x % p.kv_heads;
    const u64 token = static_cast<u64>(batch) * p.sequence;

    const u32 warpgroup = threadIdx.x / WARPGROUP;
    const u32 key_block = key_tile * WARPGROUPS + warpgroup;
    const u32 key = key_block * BLOCK + threadIdx.x % WARPGROUP / LANES * 16 + lane_id() / 4;

    const u32 k_tile = shared_address(shared), v_tile = k_tile + K_BYTES, row_tiles = v_tile + V_BYTES;
    RowFacts* facts = reinterpret_cast<RowFacts*>(shared + K_BYTES + V_BYTES + STAGES * (Q_BYTES + D_OUT_BYTES));
    const bool q_vectors = in_vectors(given.q, p.qk_dim), k_vectors = in_vectors(given.k, p.qk_dim);
    const bool v_vectors = in_vectors(given.v, p.v_dim), d_out_vectors = in_vectors(given.d_out, p.v_dim);

    // The place itself, or the next in which some row of the block may see a key of this tile.
    const auto seeing = [&](Place place) {
        for (; place.member < members; place = {place.member + 1, key_tile * WARPGROUPS}) {
            for (; place.block < p.blocks; place.block++) {
                if (first_tile(given.first, batch, p.blocks, place.block) <= key_tile * KEYS) return place;
            }
        }
        return place;
    };
    const auto load_rows = [&](u32 stage, Place place) {
        const u32 head = kv_head * members + place.member, row = place.block * BLOCK;
        const u32 q_tile = row_tiles + stage * (Q_BYTES + D_OUT_BYTES);
        load_tile<BLOCK, QK, THREADS>(
            q_tile, rows_of(given.q, p.heads, p.qk_dim, token, p.sequence, head, row), q_vectors);
        load_tile<BLOCK, V, THREADS>(
            q_tile + Q_BYTES, rows_of(given.d_out, p.heads, p.v_dim, token, p.sequence, head, row), d_out_vectors);
        copies_commit();
        if (threadIdx.x < BLOCK) {
            const u32 i = threadIdx.x;
            const bool there = row + i < p.sequence;
            const u64 query = (token + row + i) * p.heads + head;
            facts[stage].lse[i] = there ? given.lse[query] : 0.0f;
            facts[stage].delta[i] = there ? given.delta[query] : 0.0f;
            facts[stage].start[i] = first_key(given.start, token, row + i, p.sequence);
        }
    };

    load_tile<KEYS, QK, THREADS>(
        k_tile, rows_of(given.k, p.kv_heads, p.qk_dim, token, p.sequence, kv_head, key_tile * KEYS), k_vectors);
    load_tile<KEYS, V, THREADS>(
        v_tile, rows_of(given.v, p.kv_heads, p.v_dim, token, p.sequence, kv_head, key_tile * KEYS), v_vectors);
    Place place = seeing({0, key_tile * WARPGROUPS});
    if (place.member < members) load_rows(0, place);

    Accumulator<GRAD_KEYS ? QK : 16> d_k;
    Accumulator<GRAD_VALUES ? V : 16> d_v;
    d_k.clear();
    d_v.clear();
    const float scale = __uint_as_float(p.scale);
    u32 stage = 0;
    while (place.member < members) {
        tiles_ready();
        const Place next = seeing({place.member, place.block + 1});
        if (STAGES > 1 && next.member < members) load_rows(stage ^ 1, next);
        if (key_block <= place.block) {
            const u32 q_tile = row_tiles + stage * (Q_BYTES + D_OUT_BYTES), d_out_tile = q_tile + Q_BYTES;
            const RowFacts& rows = facts[stage];
            for (u32 half = 0; half < BLOCK; half += HALF) {
                float s[HALF / 2], dp[HALF / 2];
                products_begin(s, dp);
                multiply_rows<QK, KEYS, BLOCK>(s, k_tile + warpgroup * BLOCK * SPAN * 2, q_tile + half * SPAN * 2);
                if (GRAD_KEYS) {
                    multiply_rows<V, KEYS, BLOCK>(dp, v_tile + warpgroup * BLOCK * SPAN * 2, d_out_tile + half * SPAN * 2);
                }
                products_done(s, dp);
                const auto row_of = [&](u32 i) { return half + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; };
                const auto seen = [&](u32 i) {
                    return visible(key + i / 2 % 2 * 8, rows.start[row_of(i)], place.block * BLOCK + row_of(i));
                };
                bool ordinary = true;
#pragma unroll
                for (u32 i = 0; i < HALF / 2; i++) {
                    s[i] = s[i] * scale - rows.lse[row_of(i)];
                    ordinary &= seen(i) && exp_is_ordinary(s[i]);
                    if (GRAD_KEYS) dp[i] -= rows.delta[row_of(i)];
                }
                if (__all_sync(ALL_LANES, ordinary)) {
#pragma unroll
                    for (u32 i = 0; i < HALF / 2; i++) {
                        s[i] = f32_exp_ordinary(s[i]);
                        if (GRAD_KEYS) dp[i] *= s[i];
                    }
                } else {
#pragma unroll
                    for (u32 i = 0; i < HALF / 2; i++) {
                        s[i] = seen(i) ? f32_exp(s[i]) : 0.0f;
                        if (GRAD_KEYS) dp[i] = seen(i) ? s[i] * dp[i] : 0.0f;
                    }
                }
                u32 probabilities[HALF / STEP][4], slopes[HALF / STEP][4];
#pragma unroll
                for (u32 i = 0; i < HALF / 4; i++) {
                    if (GRAD_VALUES) probabilities[i / 4][i % 4] = bf16_pair(s[2 * i], s[2 * i + 1]);
                    if (GRAD_KEYS) slopes[i / 4][i % 4] = bf16_pair(dp[2 * i], dp[2 * i + 1]);
                }
                products_begin(d_k, d_v, probabilities, slopes);
#pragma unroll
                for (u32 i = 0; i < HALF / STEP; i++) {
                    if (GRAD_VALUES) multiply_step<BLOCK>(d_v, probabilities[i], d_out_tile, half + i * STEP);
                    if (GRAD_KEYS) multiply_step<BLOCK>(d_k, slopes[i], q_tile, half + i * STEP);
                }
                products_done(d_k, d_v);
            }
        }
        place = next;
        if (STAGES == 1) {
            __syncthreads();
            if (place.member < members) load_rows(0, place);
        } else {
            stage ^= 1;
        }
    }

    if (GRAD_KEYS) {
        store_rows<QK>(given.d_k, p.kv_heads, p.qk_dim, token, p.sequence, kv_head, key,
                       [&](u32, u32 piece, u32 i) { return d_k.piece[piece][i] * scale; });
    }
    if (GRAD_VALUES) {
        store_rows<V>(given.d_v, p.kv_heads, p.v_dim, token, p.sequence, kv_head, key,
                      [&](u32, u32 piece, u32 i) { return d_v.piece[piece][i]; });
    }
}
