// The gradient of the queries of attention with bf16 operands on tensor cores. NUMERICS.md, "Attention", backward.
//
// q, d_q [tokens, heads * qk_dim], k [.., kv_heads * qk_dim], v [.., kv_heads * v_dim], d_out [.., heads * v_dim],
// lse, delta [.., heads], start [tokens], first [batch, blocks of 64 rows]. Maps: q and d_out in boxes of 64 * WARPGROUPS
// rows, k and v of KEYS.
//
// A consumer warpgroup has 64 rows of a head, and holds their chains in registers while the keys go by in tiles of KEYS.
// While it computes the gradients of a tile's scores, the tensor cores multiply those of the tile before with its keys.
// QK and V are the heads' elements, padded to 16, 32 or a multiple of 64.
//
// Shared memory: q [64 * WARPGROUPS, QK], d_out [64 * WARPGROUPS, V], STAGES times k [KEYS, QK] and v [KEYS, V], Control.

static_assert(STAGES > 1);

constexpr u32 STEPS = KEYS / STEP;
using Scores = float[KEYS / 2];
using Slopes = u32[STEPS][4];

constexpr u32 ROWS = WARPGROUPS * BLOCK;
constexpr u32 Q_BYTES = tile_bytes(ROWS, QK), D_OUT_BYTES = tile_bytes(ROWS, V);
constexpr u32 K_BYTES = tile_bytes(KEYS, QK), V_BYTES = tile_bytes(KEYS, V);

extern __shared__ __align__(1024) u8 shared[];

struct Control {
    u64 rows;
    Ring<Leavers::WARPS> keys;
};
static_assert(sizeof(Control) <= CONTROL_BYTES);

__device__ __forceinline__ Control& control() {
    return *reinterpret_cast<Control*>(shared + Q_BYTES + D_OUT_BYTES + STAGES * (K_BYTES + V_BYTES));
}

__device__ __forceinline__ u32 q_tile() { return shared_address(shared); }
__device__ __forceinline__ u32 d_out_tile() { return q_tile() + Q_BYTES; }
__device__ __forceinline__ u32 k_tile(u32 stage) { return d_out_tile() + D_OUT_BYTES + stage * (K_BYTES + V_BYTES); }
__device__ __forceinline__ u32 v_tile(u32 stage) { return k_tile(stage) + K_BYTES; }

__device__ __forceinline__ void produce(const Given& given, const Work& work, const Keys& keys) {
    const Scalars& p = given.scalars;
    const Source q = {given.q, &given.maps[0], p.heads, p.qk_dim}, d_out = {given.d_out, &given.maps[1], p.heads, p.v_dim};
    const Source k = {given.k, &given.maps[2], p.kv_heads, p.qk_dim}, v = {given.v, &given.maps[3], p.kv_heads, p.v_dim};
    const u32 kv_head = work.head / (p.heads / p.kv_heads);
    bring<ROWS, QK>(q_tile(), &control().rows, q, p, work.batch, work.head, work.tile * ROWS);
    bring<ROWS, V>(d_out_tile(), &control().rows, d_out, p, work.batch, work.head, work.tile * ROWS);
    brought(&control().rows);
    Place place;
    for (u32 tile = keys.begin; tile < keys.end; tile += KEYS) {
        u64* full = control().keys.full + place.stage;
        control().keys.wait_empty(place);
        bring<KEYS, QK>(k_tile(place.stage), full, k, p, work.batch, kv_head, tile);
        bring<KEYS, V>(v_tile(place.stage), full, v, p, work.batch, kv_head, tile);
        brought(full);
        place.advance();
    }
}

// What a thread knows of its upper and its lower row.
struct RowFacts {
    u32 row, start[2];
    float lse[2], delta[2];

    // Turns the products of the rows with the tile's keys from `tile` on, and of the result's gradient with its values,
    // `ds`, into gradients of the scores.
    __device__ __forceinline__ void slopes(Scores& s, Scores& ds, u32 tile, float factor) const {
        const bool whole = max(start[0], start[1]) <= tile && tile + KEYS <= row + 1;
        if (__all_sync(ALL_LANES, whole && fused(lse[0]) && fused(lse[1]))) {
#pragma unroll
            for (u32 i = 0; i < KEYS / 2; i++) {
                const u32 half = i / 2 % 2;
                ds[i] = f32_ex2(fused_exponent(s[i], factor, lse[half])) * (ds[i] - delta[half]);
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < KEYS / 2; i++) {
                const u32 half = i / 2 % 2, key = tile + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                const bool seen = visible(key, start[half], row + 8 * half);
                const float slope = f32_ex2(exponent(s[i], factor, lse[half])) * (ds[i] - delta[half]);
                ds[i] = seen ? slope : 0.0f;
            }
        }
    }
};

// The gradient of one row's query, by a warp.
__device__ __forceinline__ void row_alone(const Given& given, u64 token, u32 head, u32 row) {
    const Scalars& p = given.scalars;
    const u64 query = (token + row) * p.heads + head;
    const u32 kv_head = head / (p.heads / p.kv_heads), lane = lane_id();
    const HeadRows q(given.q, p.heads, p.qk_dim, token, head), d_out(given.d_out, p.heads, p.v_dim, token, head);
    const HeadRows k(given.k, p.kv_heads, p.qk_dim, token, kv_head), v(given.v, p.kv_heads, p.v_dim, token, kv_head);
    const float scale = __uint_as_float(p.scale), factor = exponent_factor(p);
    const float lse = given.lse[query], delta = given.delta[query];
    const u32 start = first_key(given.start, token, row, p.sequence);
    const auto seen = [&](u32 key) { return visible(key, start, row); };

    float d_q[lane_share(QK)] = {};
#pragma unroll 1
    for (u32 first = start / STEP * STEP; first <= row && !all_nan(d_q, p.qk_dim); first += LANES) {
        const u32 key = first + lane;
        const float s = chain_of(q, row, k, key, seen(key)), dp = chain_of(d_out, row, v, key, seen(key));
        const u32 code = bf16_bits(f32_ex2(exponent(s, factor, lse)) * (dp - delta));
#pragma unroll 1
        for (u32 i = 0; i < LANES; i += STEP) continue_step(d_q, code, i, k, first + i, seen);
    }
#pragma unroll
    for (u32 j = 0; j < lane_share(QK); j++) {
        const u32 column = j * LANES + lane;
        if (column < p.qk_dim) store(given.d_q, query * p.qk_dim + column, end_of(d_q[j]) * scale);
    }
}

__device__ __forceinline__ void consume(const Given& given, const Work& work, const Keys& all) {
    const Scalars& p = given.scalars;
    const u64 token = static_cast<u64>(work.batch) * p.sequence;
    const u32 block = work.tile * WARPGROUPS + consumer();
    RowFacts rows;
    rows.row = block * BLOCK + row_in_block();
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 row = rows.row + 8 * half;
        const bool there = row < p.sequence;
        const u64 query = (token + row) * p.heads + work.head;
        rows.lse[half] = there ? given.lse[query] : 0.0f;
        rows.delta[half] = there ? given.delta[query] : 0.0f;
        rows.start[half] = first_key(given.start, token, row, p.sequence);
    }
    const Keys own = keys_of(given.first, work.batch, p.blocks, block, p.sequence);
    const u32 q_rows = q_tile() + consumer() * BLOCK * SPAN_BYTES, d_out_rows = d_out_tile() + consumer() * BLOCK * SPAN_BYTES;
    const float scale = __uint_as_float(p.scale), factor = exponent_factor(p);

    float d_q[QK / 2];
    Scores s, ds;
    Slopes slopes;
    clear(d_q);

    Place place, before;
    u32 tile = all.begin;
    // Tiles that other warpgroups read.
    const auto pass = [&](u32 end) {
        for (; tile < end; tile += KEYS) {
            control().keys.wait_full(place);
            control().keys.leave(place.stage);
            place.advance();
        }
    };
    const auto start_scores = [&] {
        control().keys.wait_full(place);
        wgmma_begin(s, ds);
        multiply_rows<QK, ROWS, KEYS>(s, q_rows, k_tile(place.stage));
        multiply_rows<V, ROWS, KEYS>(ds, d_out_rows, v_tile(place.stage));
        wgmma_commit();
    };
    const auto start_chains = [&] {
        wgmma_begin(d_q, slopes);
        multiply_steps<KEYS, 0, STEPS>(d_q, slopes, k_tile(before.stage), 0);
        wgmma_commit();
    };

    barrier_wait(&control().rows, 0);
    pass(min(own.begin, all.end));
    if (tile < own.end) {
        start_scores();
        wgmma_wait<0>(s, ds);
        while (true) {
            rows.slopes(s, ds, tile, factor);
            wgmma_wait<0>(d_q, slopes);
            if (tile > own.begin) control().keys.leave(before.stage);
            pack(slopes, ds);
            before = place;
            place.advance();
            tile += KEYS;
            if (tile >= own.end) break;
            start_scores();
            start_chains();
            wgmma_wait<1>(s, ds);
        }
        start_chains();
        wgmma_wait<0>(d_q, slopes);
        control().keys.leave(before.stage);
    }
    pass(all.end);

    store_rows<QK>(given.d_q, p.heads, p.qk_dim, token, p.sequence, work.head, rows.row,
                   [&](u32, u32 i) { return end_of(d_q[i]) * scale; });

    bool again[2] = {false, false};
    find_nan(again, d_q);
    // Where a slope of a key that the row sees is NaN for their sake, all is.
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 row = rows.row + 8 * half;
        const bool all = rows.start[half] <= row && (is_nan(rows.lse[half]) || is_nan(rows.delta[half]));
        again[half] &= row < p.sequence && !all;
    }
    for_rows_again(again, rows.row, [&](u32 row) { row_alone(given, token, work.head, row); });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_grad_queries(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const Work work = row_work_of(blockIdx.x, p, ROWS);
    const Keys keys = keys_of(given.first, work.batch, p.blocks, work.tile * WARPGROUPS, p.sequence, WARPGROUPS);

    if (threadIdx.x == 0) {
        barrier_init(&control().rows, PRODUCERS);
        control().keys.init();
    }
    take_roles([&] { produce(given, work, keys); }, [&] { consume(given, work, keys); });
}
