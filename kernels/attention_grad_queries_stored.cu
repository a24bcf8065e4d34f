// The gradient of the queries of attention from slopes that attention_grad_keys.cu left. NUMERICS.md, "Attention", backward.
//
// q, d_q [tokens, heads * qk_dim], k [.., kv_heads * qk_dim], v [.., kv_heads * v_dim], d_out [.., heads * v_dim],
// lse, delta [.., heads], start [tokens], first [batch, blocks of 64 rows], slopes as attention_tile.cuh says. Map: k in boxes
// of 64 rows.
//
// A consumer warpgroup has EACH blocks of 64 rows of a head, and holds their chains in registers while the keys go by in
// blocks of 64. QK is the heads' elements, padded to 16, 32 or a multiple of 64.
//
// Shared memory: STAGES times slopes [WARPGROUPS * EACH blocks][64, 64] and k [64, QK], Control.

constexpr u32 BLOCKS = WARPGROUPS * EACH;
constexpr u32 K_BYTES = tile_bytes(BLOCK, QK), STAGE_BYTES = BLOCKS * SLOPES_BYTES + K_BYTES;

extern __shared__ __align__(1024) u8 shared[];

struct Control {
    Ring<Leavers::WARPS> keys;
};
static_assert(sizeof(Control) <= CONTROL_BYTES);

__device__ __forceinline__ Control& control() { return *reinterpret_cast<Control*>(shared + STAGES * STAGE_BYTES); }

__device__ __forceinline__ u32 slopes_tile(u32 stage, u32 block) {
    return shared_address(shared) + stage * STAGE_BYTES + block * SLOPES_BYTES;
}
__device__ __forceinline__ u32 k_tile(u32 stage) { return slopes_tile(stage, BLOCKS); }

// The blocks of keys through which a block of rows goes.
__device__ __forceinline__ Keys key_blocks_of(const Given& given, const Work& work, u32 block, u32 count) {
    const Scalars& p = given.scalars;
    const Keys keys = keys_of(given.first, work.batch, p.blocks, block, p.sequence, count);
    return {keys.begin / BLOCK, (keys.end + BLOCK - 1) / BLOCK};
}

__device__ __forceinline__ void produce(const Given& given, const Work& work, const Keys& all) {
    const Scalars& p = given.scalars;
    const Source k = {given.k, &given.maps[0], p.kv_heads, p.qk_dim};
    const u32 kv_head = work.head / (p.heads / p.kv_heads), first = work.tile * BLOCKS;
    Keys keys[BLOCKS];
#pragma unroll
    for (u32 i = 0; i < BLOCKS; i++) keys[i] = key_blocks_of(given, work, first + i, 1);
    Place place;
    for (u32 block = all.begin; block < all.end; block++) {
        u64* full = control().keys.full + place.stage;
        control().keys.wait_empty(place);
        bring<BLOCK, QK>(k_tile(place.stage), full, k, p, work.batch, kv_head, block * BLOCK);
        if (threadIdx.x == 0) {
#pragma unroll
            for (u32 i = 0; i < BLOCKS; i++) {
                if (!keys[i].has(block)) continue;
                const bf16* from = given.slopes + slopes_of(p, work.batch, work.head, first + i) + block * SLOPES;
                barrier_expect(full, SLOPES_BYTES);
                copy_bulk(slopes_tile(place.stage, i), from, SLOPES_BYTES, full);
            }
        }
        brought(full);
        place.advance();
    }
}

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
    const u32 mine = consumer() * EACH, first = work.tile * BLOCKS + mine;
    const float scale = __uint_as_float(p.scale);

    Keys keys[EACH];
    float d_q[EACH][QK / 2];
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        keys[i] = key_blocks_of(given, work, first + i, 1);
        clear(d_q[i]);
    }

    Place place, before;
    for (u32 block = all.begin; block < all.end; block++) {
        control().keys.wait_full(place);
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            wgmma_begin(d_q[i]);
            if (keys[i].has(block)) multiply_block(d_q[i], slopes_tile(place.stage, mine + i), k_tile(place.stage));
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (block > all.begin) control().keys.leave(before.stage);
        before = place;
        place.advance();
    }
#pragma unroll
    for (u32 i = 0; i < EACH; i++) wgmma_wait<0>(d_q[i]);

#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        const u32 row = (first + i) * BLOCK + row_in_block();
        store_rows<QK>(given.d_q, p.heads, p.qk_dim, token, p.sequence, work.head, row,
                       [&](u32, u32 j) { return end_of(d_q[i][j]) * scale; });
        bool again[2] = {false, false};
        find_nan(again, d_q[i]);
        // Where a slope of a key that the row sees is NaN for their sake, all is.
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            if (!again[half]) continue;
            const u32 mine = row + 8 * half;
            const u64 query = (token + mine) * p.heads + work.head;
            again[half] = mine < p.sequence && !(first_key(given.start, token, mine, p.sequence) <= mine &&
                                                 (is_nan(given.lse[query]) || is_nan(given.delta[query])));
        }
        for_rows_again(again, row, [&](u32 row) { row_alone(given, token, work.head, row); });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_grad_queries_stored(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const Work work = row_work_of(blockIdx.x, p, BLOCKS * BLOCK);
    const Keys keys = key_blocks_of(given, work, work.tile * BLOCKS, BLOCKS);

    if (threadIdx.x == 0) control().keys.init();
    take_roles([&] { produce(given, work, keys); }, [&] { consume(given, work, keys); });
}
