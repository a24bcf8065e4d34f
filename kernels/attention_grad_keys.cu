// The gradients of keys and values of attention with bf16 operands on tensor cores. NUMERICS.md, "Attention", backward.
//
// q, d_q [tokens, heads * qk_dim], k, d_k [.., kv_heads * qk_dim], v, d_v [.., kv_heads * v_dim],
// d_out [.., heads * v_dim], lse, delta [.., heads], start [tokens], first [batch, blocks of 64 rows]. Maps: q and d_out in
// boxes of 64 rows, k and v of 64 * WARPGROUPS.
//
// A consumer warpgroup has 64 keys of a key head, and holds their chains in registers while the rows of the query heads go
// by in blocks of 64. Scores are computed transposed, so that they are the left factor of the second products as they lie
// in registers. While it works on them, the tensor cores work for the other warpgroup. QK and V are the heads' elements, padded to 16, 32 or
// a multiple of 64. GRAD_KEYS, GRAD_VALUES: which of the two results a launch computes; large heads need one for each.
//
// `slopes`: where the rounded gradients of the scores are left for the gradient of the queries.
//
// Shared memory: k [64 * WARPGROUPS, QK], v [64 * WARPGROUPS, V], STAGES times q [64, QK] and d_out [64, V], WARPGROUPS times
// slopes [64, 64], Control.

// Rows whose scores are worked on at a time: the chains and the scores of more would not fit into the registers.
constexpr u32 PART = QK < 256 && V < 256 && QK + V <= 256 ? BLOCK : BLOCK / 2;
constexpr u32 STEPS = PART / STEP;
using Scores = float[PART / 2];
using Factors = u32[STEPS][4];

constexpr u32 KEYS = WARPGROUPS * BLOCK;
constexpr u32 K_BYTES = tile_bytes(KEYS, QK), V_BYTES = tile_bytes(KEYS, V);
constexpr u32 Q_BYTES = tile_bytes(BLOCK, QK), D_OUT_BYTES = tile_bytes(BLOCK, V);
// While a warpgroup works on the scores of a part, the tensor cores multiply those of the part before, if there are registers
// for both, and a third stage: between two parts a warpgroup may pass a block of rows that another one works on, while it
// holds the stage of the part before and waits for the one after.
constexpr bool OVERLAP = STAGES > 2 && PART < BLOCK;
constexpr bool KEEP = GRAD_KEYS && slopes_given;

extern __shared__ __align__(1024) u8 shared[];

// What the scores of a block of rows need to become probabilities and their gradients.
struct RowFacts {
    float lse[BLOCK], delta[BLOCK];
    u32 start[BLOCK];
    // NONE: there are no more rows.
    u32 block;
    // The key from which on all rows see those up to themselves, with exponents that round once; NONE: there is none.
    u32 ordinary_from;
    u32 head;
};

struct Control {
    u64 keys;
    Ring<Leavers::THREADS> rows;
    RowFacts facts[STAGES];
};
static_assert(sizeof(Control) <= CONTROL_BYTES);

__device__ __forceinline__ Control& control() {
    return *reinterpret_cast<Control*>(
        shared + K_BYTES + V_BYTES + STAGES * (Q_BYTES + D_OUT_BYTES) + (KEEP ? WARPGROUPS * SLOPES_BYTES : 0));
}

__device__ __forceinline__ u32 k_tile() { return shared_address(shared); }
__device__ __forceinline__ u32 v_tile() { return k_tile() + K_BYTES; }
__device__ __forceinline__ u32 q_tile(u32 stage) { return v_tile() + V_BYTES + stage * (Q_BYTES + D_OUT_BYTES); }
__device__ __forceinline__ u32 d_out_tile(u32 stage) { return q_tile(stage) + Q_BYTES; }
__device__ __forceinline__ u32 slopes_tile() { return q_tile(STAGES) + (threadIdx.x / WARPGROUP - 1) * SLOPES_BYTES; }

__device__ __forceinline__ void produce(const Given& given, const Work& work) {
    const Scalars& p = given.scalars;
    const u32 members = p.heads / p.kv_heads;
    const u64 token = static_cast<u64>(work.batch) * p.sequence;
    const Source q = {given.q, &given.maps[0], p.heads, p.qk_dim}, d_out = {given.d_out, &given.maps[1], p.heads, p.v_dim};
    const Source k = {given.k, &given.maps[2], p.kv_heads, p.qk_dim}, v = {given.v, &given.maps[3], p.kv_heads, p.v_dim};
    bring<KEYS, QK>(k_tile(), &control().keys, k, p, work.batch, work.head, work.tile * KEYS);
    bring<KEYS, V>(v_tile(), &control().keys, v, p, work.batch, work.head, work.tile * KEYS);
    brought(&control().keys);
    Place place;
    for (u32 member = 0; member < members; member++) {
        const u32 head = work.head * members + member;
        for (u32 block = work.tile * WARPGROUPS; block < p.blocks; block++) {
            if (first_tile(given.first, work.batch, p.blocks, block) > work.tile * KEYS) continue;
            u64* full = control().rows.full + place.stage;
            RowFacts& facts = control().facts[place.stage];
            control().rows.wait_empty(place);
            bring<BLOCK, QK>(q_tile(place.stage), full, q, p, work.batch, head, block * BLOCK);
            bring<BLOCK, V>(d_out_tile(place.stage), full, d_out, p, work.batch, head, block * BLOCK);
            u32 ordinary_from = 0;
#pragma unroll 1
            for (u32 i = threadIdx.x; i < BLOCK; i += PRODUCERS) {
                const u32 row = block * BLOCK + i;
                const bool there = row < p.sequence;
                const u64 query = (token + row) * p.heads + head;
                facts.lse[i] = there ? given.lse[query] : 0.0f;
                facts.delta[i] = there ? given.delta[query] : 0.0f;
                facts.start[i] = first_key(given.start, token, row, p.sequence);
                ordinary_from = max(ordinary_from, fused(facts.lse[i]) ? facts.start[i] : NONE);
            }
            ordinary_from = __reduce_max_sync(ALL_LANES, ordinary_from);
            if (threadIdx.x == 0) {
                facts.block = block;
                // One warp has seen all rows.
                facts.ordinary_from = BOXES ? ordinary_from : NONE;
                facts.head = head;
            }
            brought(full);
            place.advance();
        }
    }
    control().rows.wait_empty(place);
    if (threadIdx.x == 0) control().facts[place.stage].block = NONE;
    brought(control().rows.full + place.stage);
}

// Turns the products of keys, `key` and the one 8 below, with PART rows from `first` of the block on, and of the values with
// the result's gradient, `dp`, into probabilities and the gradients of the scores, rounded. ORDINARY: all rows see the keys,
// and their exponents round once.
template <bool ORDINARY>
__device__ __forceinline__ void probabilities_and_slopes(Factors& probabilities, Factors& slopes, const Scores& s, const Scores& dp,
                                                         const RowFacts& rows, u32 first, u32 key, float factor) {
#pragma unroll
    for (u32 i = 0; i < PART / 2; i += 4) {
        // Else the compiler would load all of them first.
        asm volatile("" ::: "memory");
        const u32 row = first + i / 4 * 8 + threadIdx.x % 4 * 2;
        const float lse[2] = {rows.lse[row], rows.lse[row + 1]}, delta[2] = {rows.delta[row], rows.delta[row + 1]};
        const auto seen = [&](u32 j) {
            return ORDINARY || visible(key + j / 2 % 2 * 8, rows.start[row + j % 2], rows.block * BLOCK + row + j % 2);
        };
        const auto probability = [&](u32 j) {
            const float from = lse[j % 2];
            return seen(j) ? f32_ex2(ORDINARY ? fused_exponent(s[j], factor, from) : exponent(s[j], factor, from)) : 0.0f;
        };
        const auto slope = [&](u32 j, float p) { return seen(j) ? p * (dp[j] - delta[j % 2]) : 0.0f; };
#pragma unroll
        for (u32 j = i; j < i + 4; j += 2) {
            const float left = probability(j), right = probability(j + 1);
            if (GRAD_VALUES) probabilities[j / 8][j / 2 % 4] = bf16_pair(left, right);
            if (GRAD_KEYS) slopes[j / 8][j / 2 % 4] = bf16_pair(slope(j, left), slope(j + 1, right));
        }
    }
}

// The gradients of one key and its value, by a warp.
__device__ __forceinline__ void key_alone(const Given& given, u64 token, u32 kv_head, u32 key) {
    const Scalars& p = given.scalars;
    const u64 place = (token + key) * p.kv_heads + kv_head;
    const u32 members = p.heads / p.kv_heads, lane = lane_id();
    const HeadRows k(given.k, p.kv_heads, p.qk_dim, token, kv_head), v(given.v, p.kv_heads, p.v_dim, token, kv_head);
    const float scale = __uint_as_float(p.scale), factor = exponent_factor(p);

    float d_k[GRAD_KEYS ? lane_share(QK) : 1] = {}, d_v[GRAD_VALUES ? lane_share(V) : 1] = {};
#pragma unroll 1
    for (u32 head = kv_head * members; head < (kv_head + 1) * members; head++) {
        const HeadRows q(given.q, p.heads, p.qk_dim, token, head), d_out(given.d_out, p.heads, p.v_dim, token, head);
#pragma unroll 1
        for (u32 first = key / STEP * STEP; first < p.sequence; first += LANES) {
            const u32 row = first + lane;
            const bool sees = visible(key, first_key(given.start, token, row, p.sequence), row);
            const u32 seeing = __ballot_sync(ALL_LANES, sees);
            if (seeing == 0) continue;
            const auto seen = [&](u32 row) { return (seeing >> (row - first) & 1) != 0; };
            const u64 query = (token + row) * p.heads + head;
            const float lse = sees ? given.lse[query] : 0.0f, delta = sees ? given.delta[query] : 0.0f;
            // Then all of both is NaN, and stored.
            if (__any_sync(ALL_LANES, is_nan(lse))) return;
            const float probability = f32_ex2(exponent(chain_of(k, key, q, row, sees), factor, lse));
            u32 slope = 0;
            if (GRAD_KEYS) slope = bf16_bits(probability * (chain_of(v, key, d_out, row, sees) - delta));
#pragma unroll 1
            for (u32 i = 0; i < LANES; i += STEP) {
                if (GRAD_VALUES) continue_step(d_v, bf16_bits(probability), i, d_out, first + i, seen);
                if (GRAD_KEYS) continue_step(d_k, slope, i, q, first + i, seen);
            }
            if ((!GRAD_KEYS || all_nan(d_k, p.qk_dim)) && (!GRAD_VALUES || all_nan(d_v, p.v_dim))) return;
        }
    }
    for (u32 j = 0; GRAD_KEYS && j < lane_share(QK); j++) {
        const u32 column = j * LANES + lane;
        if (column < p.qk_dim) store(given.d_k, place * p.qk_dim + column, end_of(d_k[j]) * scale);
    }
    for (u32 j = 0; GRAD_VALUES && j < lane_share(V); j++) {
        const u32 column = j * LANES + lane;
        if (column < p.v_dim) store(given.d_v, place * p.v_dim + column, end_of(d_v[j]));
    }
}

// Other registers with the same values.
__device__ __forceinline__ void copy(Factors& to, const Factors& from) {
    // Unknown to the compiler, which would use the same registers.
    u32 identity = 0x3210;
    asm volatile("" : "+r"(identity));
#pragma unroll
    for (u32 i = 0; i < STEPS * 4; i++) to[i / 4][i % 4] = __byte_perm(from[i / 4][i % 4], 0, identity);
}

// Leaves the slopes of 64 keys with PART rows from `first` of a block on; the block's go to device memory with its last part.
__device__ __forceinline__ void
keep_slopes(const Given& given, u32 batch, const Factors& slopes, u32 first, const RowFacts& rows, u32 key_block) {
    const u32 tile = slopes_tile(), lane = lane_id(), warp = threadIdx.x % WARPGROUP / LANES;
    const auto meet = [] { threads_meet<WARPGROUP>(threadIdx.x / WARPGROUP); };
    if (first == 0) {
        // Those of the block before have left.
        if (threadIdx.x % WARPGROUP == 0) stores_wait<0>();
        meet();
    }
#pragma unroll
    for (u32 i = 0; i < STEPS; i++) {
        // Matrix m: rows 8 (m / 2) on, keys 8 (m % 2) on.
        const u32 row = first + i * STEP + lane / 16 * 8 + lane % 8, key = warp * 16 + lane / 8 % 2 * 8;
        store_shared_transposed(tile + swizzled(row * SPAN_BYTES + key * 2), slopes[i]);
    }
    if (first + PART == BLOCK) {
        fence_async();
        meet();
        if (threadIdx.x % WARPGROUP == 0) {
            const u64 to = slopes_of(given.scalars, batch, rows.head, rows.block) + key_block * SLOPES;
            store_bulk(given.slopes + to, tile, SLOPES_BYTES);
            stores_commit();
        }
    }
}

__device__ __forceinline__ void consume(const Given& given, const Work& work) {
    const Scalars& p = given.scalars;
    const u64 token = static_cast<u64>(work.batch) * p.sequence;
    const u32 key_block = work.tile * WARPGROUPS + consumer(), key = key_block * BLOCK + row_in_block();
    const u32 k_rows = k_tile() + consumer() * BLOCK * SPAN_BYTES, v_rows = v_tile() + consumer() * BLOCK * SPAN_BYTES;
    const float scale = __uint_as_float(p.scale), factor = exponent_factor(p);

    float d_k[GRAD_KEYS ? QK / 2 : 1], d_v[GRAD_VALUES ? V / 2 : 1];
    Scores s, dp;
    Factors probabilities, slopes;
    clear(d_k);
    clear(d_v);

    // The part that is worked on, and the one before: the first of its rows in the block.
    Place place, before;
    u32 row = 0, before_row = 0;
    // Waits for the next block of rows of which some see keys of this warpgroup; false: there is none.
    const auto find_block = [&] {
        while (true) {
            control().rows.wait_full(place);
            const u32 block = control().facts[place.stage].block;
            if (block == NONE) return false;
            if (block >= key_block) return true;
            control().rows.leave(place.stage);
            place.advance();
        }
    };
    const auto start_scores = [&] {
        wgmma_begin(s, dp);
        multiply_rows<QK, KEYS, BLOCK>(s, k_rows, q_tile(place.stage) + row * SPAN_BYTES);
        if constexpr (GRAD_KEYS) multiply_rows<V, KEYS, BLOCK>(dp, v_rows, d_out_tile(place.stage) + row * SPAN_BYTES);
        wgmma_commit();
    };
    const auto start_chains = [&] {
        // While the tensor cores read the slopes, other registers are kept of them.
        Factors kept;
        if (KEEP && !OVERLAP) copy(kept, slopes);
        wgmma_begin(d_k, d_v, probabilities, slopes);
        if constexpr (GRAD_VALUES) multiply_steps<BLOCK, 0, STEPS>(d_v, probabilities, d_out_tile(before.stage), before_row);
        if constexpr (GRAD_KEYS) multiply_steps<BLOCK, 0, STEPS>(d_k, slopes, q_tile(before.stage), before_row);
        wgmma_commit();
        if (KEEP && !OVERLAP) keep_slopes(given, work.batch, kept, before_row, control().facts[before.stage], key_block);
    };
    const auto end_chains = [&] {
        wgmma_wait<0>(d_k, d_v, probabilities, slopes);
        if (before_row + PART == BLOCK) control().rows.leave(before.stage);
    };

    barrier_wait(&control().keys, 0);
    bool more = find_block();
    if (more) {
        start_scores();
        wgmma_wait<0>(s, dp);
        while (true) {
            if (OVERLAP) end_chains();
            const RowFacts& rows = control().facts[place.stage];
            if (__all_sync(ALL_LANES, key + 8 <= rows.block * BLOCK + row && rows.ordinary_from <= key)) {
                probabilities_and_slopes<true>(probabilities, slopes, s, dp, rows, row, key, factor);
            } else {
                probabilities_and_slopes<false>(probabilities, slopes, s, dp, rows, row, key, factor);
            }
            if (KEEP && OVERLAP) keep_slopes(given, work.batch, slopes, row, rows, key_block);
            before = place;
            before_row = row;
            if (!OVERLAP) {
                start_chains();
                end_chains();
            }
            row = (row + PART) % BLOCK;
            if (row == 0) {
                place.advance();
                more = find_block();
            }
            if (!more) break;
            start_scores();
            if (OVERLAP) start_chains();
            wgmma_wait<OVERLAP>(s, dp);
        }
        if (OVERLAP) {
            start_chains();
            end_chains();
        }
    }

    if (KEEP && threadIdx.x % WARPGROUP == 0) stores_wait<0>();

    if constexpr (GRAD_KEYS) {
        store_rows<QK>(given.d_k, p.kv_heads, p.qk_dim, token, p.sequence, work.head, key,
                       [&](u32, u32 i) { return end_of(d_k[i]) * scale; });
    }
    if constexpr (GRAD_VALUES) {
        store_rows<V>(given.d_v, p.kv_heads, p.v_dim, token, p.sequence, work.head, key, [&](u32, u32 i) { return end_of(d_v[i]); });
    }

    bool again[2] = {false, false};
    if constexpr (GRAD_KEYS) find_nan(again, d_k);
    if constexpr (GRAD_VALUES) find_nan(again, d_v);
#pragma unroll
    for (u32 half = 0; half < 2; half++) again[half] &= key + 8 * half < p.sequence;
    for_rows_again(again, key, [&](u32 key) { key_alone(given, token, work.head, key); });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_grad_keys(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    // The keys that most rows see come first.
    const Work work = work_of(blockIdx.x, p, (p.sequence + KEYS - 1) / KEYS, 1, 1, p.heads / p.kv_heads);

    if (threadIdx.x == 0) {
        barrier_init(&control().keys, PRODUCERS);
        control().rows.init();
    }
    take_roles([&] { produce(given, work); }, [&] { consume(given, work); });
}
