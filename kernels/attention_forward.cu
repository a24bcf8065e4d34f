// Causal softmax attention of bf16 operands on tensor cores. NUMERICS.md, "Attention", forward.
//
// q [tokens, heads * qk_dim], k [.., kv_heads * qk_dim], v [.., kv_heads * v_dim], out [.., heads * v_dim], lse [.., heads],
// start [tokens], first [batch, blocks of 64 rows]. Maps: q in boxes of 64 * WARPGROUPS rows, k and v of 128.
//
// A consumer warpgroup has 64 rows of a head: their scores with a tile of 128 keys, their results and all of the softmax
// stay in its registers, where a thread of a quad holds the very columns that one lane of the rule's sum adds. While it
// works on the softmax of a tile, the tensor cores multiply the probabilities of the tile before with its values; only
// the largest heads leave no registers for that. QK and V are the heads' elements, padded to 16, 32 or a multiple of 64.
//
// Shared memory: q [64 * WARPGROUPS, QK], STAGES times k [128, QK] and v [128, V], Control.

constexpr u32 STEPS = KEY_TILE / STEP;
using Scores = float[KEY_TILE / 2];
using Probabilities = u32[STEPS][4];

constexpr u32 Q_ROWS = WARPGROUPS * BLOCK;
constexpr u32 Q_BYTES = tile_bytes(Q_ROWS, QK), K_BYTES = tile_bytes(KEY_TILE, QK), V_BYTES = tile_bytes(KEY_TILE, V);
constexpr bool OVERLAP = V <= 192 && WARPGROUPS == 2;

extern __shared__ __align__(1024) u8 shared[];

struct Control {
    u64 q;
    Ring<Leavers::WARPS> k, v;
};
static_assert(sizeof(Control) <= CONTROL_BYTES);

__device__ __forceinline__ Control& control() {
    return *reinterpret_cast<Control*>(shared + Q_BYTES + STAGES * (K_BYTES + V_BYTES));
}

__device__ __forceinline__ u32 q_tile() { return shared_address(shared); }
__device__ __forceinline__ u32 k_tile(u32 stage) { return q_tile() + Q_BYTES + stage * K_BYTES; }
__device__ __forceinline__ u32 v_tile(u32 stage) { return q_tile() + Q_BYTES + STAGES * K_BYTES + stage * V_BYTES; }

__device__ __forceinline__ void produce(const Given& given, const Work& work, const Keys& keys) {
    const Scalars& p = given.scalars;
    const Source q = {given.q, &given.maps[0], p.heads, p.qk_dim};
    const Source k = {given.k, &given.maps[1], p.kv_heads, p.qk_dim}, v = {given.v, &given.maps[2], p.kv_heads, p.v_dim};
    const u32 kv_head = work.head / (p.heads / p.kv_heads);
    bring<Q_ROWS, QK>(q_tile(), &control().q, q, p, work.batch, work.head, work.tile * Q_ROWS);
    brought(&control().q);
    Place place;
    for (u32 tile = keys.begin; tile < keys.end; tile += KEY_TILE) {
        control().k.wait_empty(place);
        bring<KEY_TILE, QK>(k_tile(place.stage), control().k.full + place.stage, k, p, work.batch, kv_head, tile);
        brought(control().k.full + place.stage);
        control().v.wait_empty(place);
        bring<KEY_TILE, V>(v_tile(place.stage), control().v.full + place.stage, v, p, work.batch, kv_head, tile);
        brought(control().v.full + place.stage);
        place.advance();
    }
}

// The softmax of a thread's upper and lower row as far as their tiles have been seen; the four threads of a quad hold the
// same.
struct Softmax {
    float largest[2] = {-INFINITY_F32, -INFINITY_F32}, sum[2] = {0.0f, 0.0f};

    // Turns the products of the rows with the tile's keys from `tile` on into probabilities; `alpha` becomes the factors
    // of what was accumulated before.
    __device__ __forceinline__ void advance(Scores& s, float (&alpha)[2], u32 tile, u32 row, const u32 (&start)[2], float factor) {
        const auto seen = [&](u32 i) {
            const u32 half = i / 2 % 2;
            return visible(tile + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, start[half], row + 8 * half);
        };
        const bool whole = __all_sync(ALL_LANES, max(start[0], start[1]) <= tile && tile + KEY_TILE <= row + 1);

        if (!whole) {
#pragma unroll
            for (u32 i = 0; i < KEY_TILE / 2; i++) s[i] = seen(i) ? s[i] : -INFINITY_F32;
        }
        // Two for each row, so that one does not wait for the other. The sign of a zero, in which fmaxf differs from the
        // rule, changes nothing below.
        float highest[4] = {-INFINITY_F32, -INFINITY_F32, -INFINITY_F32, -INFINITY_F32};
#pragma unroll
        for (u32 i = 0; i < KEY_TILE / 2; i++) {
            float& most = highest[i / 2 % 2 * 2 + i % 2];
            most = fmaxf(most, s[i]);
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float most = fmaxf(highest[2 * half], highest[2 * half + 1]);
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
            most = fmaxf(largest[half], most * factor);
            alpha[half] = rescale(largest[half], most);
            largest[half] = most;
        }

        float lane[2] = {0.0f, 0.0f};
        if (__all_sync(ALL_LANES, fused(largest[0]) && fused(largest[1]))) {
            // What a row does not see is -infinity, and 0 then.
#pragma unroll
            for (u32 i = 0; i < KEY_TILE / 2; i++) {
                lane[i / 2 % 2] += s[i] = f32_ex2(fused_exponent(s[i], factor, largest[i / 2 % 2]));
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < KEY_TILE / 2; i++) {
                lane[i / 2 % 2] += s[i] = seen(i) ? f32_ex2(exponent(s[i], factor, largest[i / 2 % 2])) : 0.0f;
            }
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            lane[half] += __shfl_xor_sync(ALL_LANES, lane[half], 1);
            lane[half] += __shfl_xor_sync(ALL_LANES, lane[half], 2);
            sum[half] = sum[half] * alpha[half] + lane[half];
        }
    }
};

// The result of one row that sees a key, by a warp.
__device__ __forceinline__ void row_alone(const Given& given, u64 token, u32 head, u32 row) {
    const Scalars& p = given.scalars;
    const u32 kv_head = head / (p.heads / p.kv_heads), lane = lane_id();
    const HeadRows q(given.q, p.heads, p.qk_dim, token, head);
    const HeadRows k(given.k, p.kv_heads, p.qk_dim, token, kv_head), v(given.v, p.kv_heads, p.v_dim, token, kv_head);
    const float factor = exponent_factor(p);
    const u32 start = first_key(given.start, token, row, p.sequence);
    const auto seen = [&](u32 key) { return visible(key, start, row); };

    float o[lane_share(V)] = {}, largest = -INFINITY_F32, sum = 0.0f;
#pragma unroll 1
    for (u32 tile = start / KEY_TILE * KEY_TILE; tile <= row && !all_nan(o, p.v_dim); tile += KEY_TILE) {
        // A lane has every 32nd key.
        constexpr u32 EACH = KEY_TILE / LANES;
        float s[EACH], highest = -INFINITY_F32, part = 0.0f;
        u32 codes[EACH];
#pragma unroll 1
        for (u32 m = 0; m < EACH; m++) {
            const u32 key = tile + m * LANES + lane;
            const float score = chain_of(q, row, k, key, seen(key));
            highest = seen(key) ? larger(highest, score) : highest;
            // Every index is a constant, so that they are registers.
#pragma unroll
            for (u32 i = 0; i < EACH; i++) s[i] = i == m ? score : s[i];
        }
        highest = larger(largest, largest_lane(highest) * factor);
#pragma unroll
        for (u32 m = 0; m < EACH; m++) {
            s[m] = seen(tile + m * LANES + lane) ? f32_ex2(exponent(s[m], factor, highest)) : 0.0f;
            codes[m] = bf16_bits(s[m]);
            // The sum's four lanes; the others of this warp do the same.
#pragma unroll 1
            for (u32 c = 0; c < LANES; c++) {
                const float term = __shfl_sync(ALL_LANES, s[m], c);
                part += c / 2 % 4 == lane % 4 ? term : 0.0f;
            }
        }
        part += __shfl_xor_sync(ALL_LANES, part, 1);
        part += __shfl_xor_sync(ALL_LANES, part, 2);
        const float alpha = rescale(largest, highest);
        sum = sum * alpha + part;
        largest = highest;
#pragma unroll
        for (u32 j = 0; j < lane_share(V); j++) o[j] *= alpha;
#pragma unroll 1
        for (u32 i = 0; i < STEPS; i++) {
            const u32 m = i * STEP / LANES, code = m == 0 ? codes[0] : m == 1 ? codes[1] : m == 2 ? codes[2] : codes[3];
            continue_step(o, code, i * STEP % LANES, v, tile + i * STEP, seen);
        }
    }
    const u64 query = (token + row) * p.heads + head;
    const float reciprocal = reciprocal_of(largest, sum);
#pragma unroll
    for (u32 j = 0; j < lane_share(V); j++) {
        const u32 column = j * LANES + lane;
        if (column < p.v_dim) store(given.out, query * p.v_dim + column, end_of(o[j]) * reciprocal);
    }
}

__device__ __forceinline__ void consume(const Given& given, const Work& work, const Keys& all) {
    const Scalars& p = given.scalars;
    const u64 token = static_cast<u64>(work.batch) * p.sequence;
    const u32 block = work.tile * WARPGROUPS + consumer(), row = block * BLOCK + row_in_block();
    const u32 start[2] = {first_key(given.start, token, row, p.sequence), first_key(given.start, token, row + 8, p.sequence)};
    const Keys own = keys_of(given.first, work.batch, p.blocks, block, p.sequence);
    const u32 q_rows = q_tile() + consumer() * BLOCK * SPAN_BYTES;
    const float factor = exponent_factor(p);

    Softmax softmax;
    float o[V / 2];
    Scores s;
    Probabilities probabilities;
    clear(o);

    Place place, before;
    u32 tile = all.begin;
    // Tiles that other warpgroups read.
    const auto pass = [&](u32 end) {
        for (; tile < end; tile += KEY_TILE) {
            control().k.wait_full(place);
            control().k.leave(place.stage);
            control().v.wait_full(place);
            control().v.leave(place.stage);
            place.advance();
        }
    };
    const auto start_scores = [&] {
        control().k.wait_full(place);
        wgmma_begin(s);
        multiply_rows<QK, Q_ROWS, KEY_TILE>(s, q_rows, k_tile(place.stage));
        wgmma_commit();
    };
    const auto start_values = [&] {
        control().v.wait_full(before);
        wgmma_begin(o, probabilities);
        multiply_steps<KEY_TILE, 0, STEPS>(o, probabilities, v_tile(before.stage), 0);
        wgmma_commit();
    };

    barrier_wait(&control().q, 0);
    pass(min(own.begin, all.end));
    if (tile < own.end) {
        start_scores();
        wgmma_wait<0>(s);
        while (true) {
            control().k.leave(place.stage);
            float alpha[2];
            softmax.advance(s, alpha, tile, row, start, factor);
            if (OVERLAP) wgmma_wait<0>(o, probabilities);
            if (OVERLAP && tile > own.begin) control().v.leave(before.stage);
#pragma unroll
            for (u32 i = 0; i < V / 2; i++) o[i] *= alpha[i / 2 % 2];
            pack(probabilities, s);
            before = place;
            place.advance();
            tile += KEY_TILE;
            if (tile >= own.end) break;
            if (!OVERLAP) {
                start_values();
                wgmma_wait<0>(o, probabilities);
                control().v.leave(before.stage);
            }
            start_scores();
            if (OVERLAP) start_values();
            wgmma_wait<OVERLAP>(s);
        }
        control().v.wait_full(before);
        wgmma_begin(o, probabilities);
        multiply_steps<KEY_TILE, 0, STEPS / 2>(o, probabilities, v_tile(before.stage), 0);
        wgmma_commit();
        wgmma_wait<0>(o, probabilities);
        // The keys past the block's last row are no terms.
        if (tile - KEY_TILE / 2 < own.end) {
            wgmma_begin(o, probabilities);
            multiply_steps<KEY_TILE, STEPS / 2, STEPS>(o, probabilities, v_tile(before.stage), 0);
            wgmma_commit();
            wgmma_wait<0>(o, probabilities);
        }
        control().v.leave(before.stage);
    }
    pass(all.end);

    const float reciprocal[2] = {reciprocal_of(softmax.largest[0], softmax.sum[0]), reciprocal_of(softmax.largest[1], softmax.sum[1])};
    store_rows<V>(given.out, p.heads, p.v_dim, token, p.sequence, work.head, row,
                  [&](u32 half, u32 i) { return end_of(o[i]) * reciprocal[half]; });
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        if (threadIdx.x % 4 == 0 && row + 8 * half < p.sequence) {
            given.lse[(token + row + 8 * half) * p.heads + work.head] = log_sum(softmax.largest[half], softmax.sum[half]);
        }
    }

    bool again[2] = {false, false};
    find_nan(again, o);
    // A row that sees no key has zeros already; and where the sum is NaN, all is.
#pragma unroll
    for (u32 half = 0; half < 2; half++) again[half] &= softmax.sum[half] > 0.0f;
    for_rows_again(again, row, [&](u32 row) { row_alone(given, token, work.head, row); });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const Work work = row_work_of(blockIdx.x, p, Q_ROWS);
    const Keys keys = keys_of(given.first, work.batch, p.blocks, work.tile * WARPGROUPS, p.sequence, WARPGROUPS);

    if (threadIdx.x == 0) {
        barrier_init(&control().q, PRODUCERS);
        control().k.init();
        control().v.init();
    }
    take_roles([&] { produce(given, work, keys); }, [&] { consume(given, work, keys); });
}
