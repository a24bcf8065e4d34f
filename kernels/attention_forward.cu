// Causal softmax attention of bf16 operands on tensor cores. NUMERICS.md, "Attention", forward.
//
// q [tokens, heads * qk_dim], k [.., kv_heads * qk_dim], v [.., kv_heads * v_dim], out [.., heads * v_dim], lse [.., heads],
// start [tokens], first [batch, blocks of 64 rows].
//
// A warpgroup has 64 rows of a head: their scores with a tile of 128 keys, their results and all of the softmax stay in
// its registers, where a thread of a quad holds the very columns that one lane of the rule's sum adds. The WARPGROUPS
// of a thread block share the tiles of keys and values, of which STAGES are in shared memory. QK and V are the heads'
// elements, padded to 16, 32 or a multiple of 64.
//
// Shared memory: q [64 * WARPGROUPS, QK], then STAGES times k [128, QK] and v [128, V].

using Scores = float[KEY_TILE / 2];

constexpr u32 THREADS = WARPGROUPS * WARPGROUP;
constexpr u32 Q_ROWS = WARPGROUPS * BLOCK;
constexpr u32 Q_BYTES = tile_bytes(Q_ROWS, QK), K_BYTES = tile_bytes(KEY_TILE, QK), V_BYTES = tile_bytes(KEY_TILE, V);

extern __shared__ __align__(1024) u8 shared[];

// The scores of one row in a tile that a thread has: the pairs of columns from `column` on, eight apart. Columns are counted
// from the first visible key, so that those below `seen` are visible (and those before it far above).
struct RowScores {
    Scores& all;
    // 0: the upper row of the thread, 1: the lower.
    u32 half, column, seen;

    template <class Use>
    __device__ __forceinline__ void each(Use use) {
#pragma unroll
        for (u32 i = 0; i < KEY_TILE / 8; i++) {
#pragma unroll
            for (u32 j = 0; j < 2; j++) use(all[4 * i + 2 * half + j], column + 8 * i + j < seen);
        }
    }
};

// The softmax of a row as far as its tiles have been seen; the four threads of a quad hold the same.
struct Softmax {
    float largest = -INFINITY_F32, sum = 0.0f;

    // Turns the products of the row with the tile's keys from `tile` on into probabilities; returns the factor of what was
    // accumulated before.
    __device__ __forceinline__ float advance(Scores& s, u32 half, u32 tile, u32 row, u32 start, float scale) {
        const u32 first = max(start, tile), end = min(row + 1, tile + KEY_TILE), seen = end > first ? end - first : 0;
        RowScores scores = {s, half, tile + threadIdx.x % 4 * 2 - first, seen};
        const bool whole = __all_sync(ALL_LANES, seen == KEY_TILE);

        // The sign of a zero, in which fmaxf differs from the rule, changes nothing below.
        float highest = -INFINITY_F32;
        if (whole) {
            scores.each([&](float& score, bool) { highest = fmaxf(highest, score *= scale); });
        } else {
            scores.each([&](float& score, bool visible) {
                score *= scale;
                if (visible) highest = fmaxf(highest, score);
            });
        }
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 2));
        highest = fmaxf(largest, highest);

        bool ordinary = whole;
        scores.each([&](float& score, bool) {
            score -= highest;
            ordinary &= exp_is_ordinary(score);
        });
        float lane = 0.0f;
        if (__all_sync(ALL_LANES, ordinary)) {
            scores.each([&](float& score, bool) { lane += score = f32_exp_ordinary(score); });
        } else {
            scores.each([&](float& score, bool visible) { lane += score = visible ? f32_exp(score) : 0.0f; });
        }
        lane += __shfl_xor_sync(ALL_LANES, lane, 1);
        lane += __shfl_xor_sync(ALL_LANES, lane, 2);
        if (seen == 0) return 1.0f;
        const float alpha = largest == -INFINITY_F32 ? 0.0f : f32_exp(largest - highest);
        sum = sum * alpha + lane;
        largest = highest;
        return alpha;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(const __grid_constant__ Given given) {
    begin(given);
    const Params& p = given.params;
    const u32 heads = p.batch * p.heads, row_tiles = (p.sequence + Q_ROWS - 1) / Q_ROWS;
    // The rows that see most come first.
    const u32 row_tile = row_tiles - 1 - blockIdx.x / heads;
    const u32 batch = blockIdx.x % heads / p.heads, head = blockIdx.x % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const u64 token = static_cast<u64>(batch) * p.sequence;

    const u32 warpgroup = threadIdx.x / WARPGROUP;
    const u32 block = row_tile * WARPGROUPS + warpgroup;
    const u32 row = block * BLOCK + threadIdx.x % WARPGROUP / LANES * 16 + lane_id() / 4;
    const u32 start[2] = {first_key(given.start, token, row, p.sequence), first_key(given.start, token, row + 8, p.sequence)};

    const Keys own = keys_of(given.first, batch, p.blocks, block, p.sequence);
    const Keys all = keys_of(given.first, batch, p.blocks, row_tile * WARPGROUPS, p.sequence, WARPGROUPS);

    const u32 q_tile = shared_address(shared);
    const u32 q_rows = q_tile + warpgroup * BLOCK * SPAN * 2;
    const bool q_vectors = in_vectors(given.q, p.qk_dim);
    const bool k_vectors = in_vectors(given.k, p.qk_dim), v_vectors = in_vectors(given.v, p.v_dim);
    const auto load_keys = [&](u32 stage, u32 key) {
        const u32 k_tile = q_tile + Q_BYTES + stage * (K_BYTES + V_BYTES);
        load_tile<KEY_TILE, QK, THREADS>(
            k_tile, rows_of(given.k, p.kv_heads, p.qk_dim, token, p.sequence, kv_head, key), k_vectors);
        load_tile<KEY_TILE, V, THREADS>(
            k_tile + K_BYTES, rows_of(given.v, p.kv_heads, p.v_dim, token, p.sequence, kv_head, key), v_vectors);
        copies_commit();
    };
    load_tile<Q_ROWS, QK, THREADS>(
        q_tile, rows_of(given.q, p.heads, p.qk_dim, token, p.sequence, head, row_tile * Q_ROWS), q_vectors);
    if (all.begin < all.end) load_keys(0, all.begin);

    Softmax softmax[2];
    Accumulator<V> o;
    o.clear();
    u32 stage = 0;
    for (u32 tile = all.begin; tile < all.end; tile += KEY_TILE) {
        tiles_ready();
        const u32 next = tile + KEY_TILE;
        if (STAGES > 1 && next < all.end) load_keys(stage ^ 1, next);
        if (own.has(tile)) {
            const u32 k_tile = q_tile + Q_BYTES + stage * (K_BYTES + V_BYTES);
            Scores s;
            products_begin(s);
            multiply_rows<QK, Q_ROWS, KEY_TILE>(s, q_rows, k_tile);
            products_done(s);
            const float scale = __uint_as_float(p.scale);
            const float upper = softmax[0].advance(s, 0, tile, row, start[0], scale);
            const float lower = softmax[1].advance(s, 1, tile, row + 8, start[1], scale);
            o.scale(upper, lower);
            u32 probabilities[KEY_TILE / STEP][4];
#pragma unroll
            for (u32 i = 0; i < KEY_TILE / 4; i++) probabilities[i / 4][i % 4] = bf16_pair(s[2 * i], s[2 * i + 1]);
#pragma unroll
            for (u32 half = 0; half < KEY_TILE; half += BLOCK) {
                // The keys past the block's last row are no terms.
                if (tile + half >= own.end) continue;
                products_begin(o, probabilities);
#pragma unroll
                for (u32 i = 0; i < BLOCK; i += STEP) {
                    multiply_step<KEY_TILE>(o, probabilities[(half + i) / STEP], k_tile + K_BYTES, half + i);
                }
                products_done(o);
            }
        }
        if (STAGES == 1) {
            __syncthreads();
            if (next < all.end) load_keys(0, next);
        } else {
            stage ^= 1;
        }
    }

    const auto quotient = [&](u32 half, u32 piece, u32 i) {
        return softmax[half].sum == 0.0f ? 0.0f : o.piece[piece][i] / softmax[half].sum;
    };
    store_rows<V>(given.out, p.heads, p.v_dim, token, p.sequence, head, row, quotient);
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        if (threadIdx.x % 4 == 0 && row + 8 * half < p.sequence) {
            given.lse[(token + row + 8 * half) * p.heads + head] = softmax[half].largest + f32_log(softmax[half].sum);
        }
    }
}
