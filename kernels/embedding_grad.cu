// The gradient of an embedding: NUMERICS.md, "Row-wise ops". A block has a token and up to 1024 columns, a run for each
// thread. It works only for the first token of its group with that id: it then looks through the tokens that follow and
// adds the gradients of those with the same id in order. So each row of the table is read and written once, and no two
// blocks meet in it. An id outside the vocabulary adds nothing.

constexpr u32 THREADS = 128;
// Tokens looked at together, each thread at `EACH`.
constexpr u32 EACH = 4;
constexpr u32 TILE = EACH * THREADS;

// One bit for each token of a tile; then the places of those that match.
__shared__ u32 matches[TILE / 32];
__shared__ u32 places[TILE];

// Collects the places of the tokens of ids[0..count] that are `id`, in order, and returns their number. All threads
// call it together.
__device__ __forceinline__ u32 collect(const u32* ids, u32 count, u32 id) {
    bool match[EACH], any = false;
#pragma unroll
    for (u32 j = 0; j < EACH; ++j) {
        const u32 place = j * THREADS + threadIdx.x;
        match[j] = place < count && __ldg(ids + place) == id;
        any |= match[j];
    }
    if (!__syncthreads_or(any)) {
        return 0;
    }
    const u32 warp = threadIdx.x / LANES, lane = lane_id();
#pragma unroll
    for (u32 j = 0; j < EACH; ++j) {
        const u32 ballot = __ballot_sync(ALL_LANES, match[j]);
        if (lane == 0) {
            matches[j * (THREADS / 32) + warp] = ballot;
        }
    }
    __syncthreads();
    u32 found = 0;
    for (u32 word = 0; word < TILE / 32; ++word) {
        const u32 bits = matches[word];
        if (word % (THREADS / 32) == warp && (bits >> lane & 1) != 0) {
            places[found + __popc(bits & ((1u << lane) - 1))] = word * 32 + lane;
        }
        found += __popc(bits);
    }
    __syncthreads();
    return found;
}

// Whether one of ids[0..count] is `id`, the nearest looked at first. All threads call it together.
__device__ __forceinline__ bool occurs(const u32* ids, u32 count, u32 id) {
    for (u32 end = count; end > 0; end -= min(end, TILE)) {
        bool any = false;
#pragma unroll
        for (u32 j = 0; j < EACH; ++j) {
            const u32 back = j * THREADS + threadIdx.x;
            any |= back < end && __ldg(ids + end - 1 - back) == id;
        }
        if (__syncthreads_or(any)) {
            return true;
        }
    }
    return false;
}

template <bool VECTOR>
__device__ __forceinline__ void add_gradients(const Given& given, u32 first, u32 tokens, u64 row, u32 column) {
    const u32* ids = given.ids + first;
    const u32 columns = given.scalars.columns;
    const bool has_columns = column < columns;
    const u32 n = has_columns ? run_length<VECTOR>(column, columns) : 0;
    Run sum;
    if (has_columns) {
        sum = load_run<VECTOR>(given.d_table, row * columns + column, n);
    }
    for (u32 tile = 0; tile < tokens; tile += TILE) {
        const u32 found = collect(ids + tile, min(TILE, tokens - tile), *ids);
        if (!has_columns) {
            continue;
        }
        const auto load_dy = [&](u64 f) {
            return load_run<VECTOR>(given.dy, (u64(first) + tile + places[f]) * columns + column, n);
        };
        in_groups<4>(0, found, 1, load_dy, [&](u64, const Run& dy) {
#pragma unroll
            for (u32 e = 0; e < RUN; ++e) {
                sum.at[e] += dy.at[e];
            }
        });
    }
    if (has_columns) {
        store_run<VECTOR>(given.d_table, row * columns + column, n, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) embedding_grad(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 slices = (p.columns + THREADS * RUN - 1) / (THREADS * RUN);
    const u32 token = blockIdx.x / slices, group = token / p.group_tokens, place = token % p.group_tokens;
    const u32 column = (blockIdx.x % slices * THREADS + threadIdx.x) * RUN;
    const u32* ids = given.ids + token;
    if (*ids >= p.vocabulary || occurs(ids - place, place, *ids)) {
        return;
    }
    const u64 row = u64(group) * p.vocabulary + *ids;
    if (vectors(p.columns, given.dy, given.d_table)) {
        add_gradients<true>(given, token, p.group_tokens - place, row, column);
    } else {
        add_gradients<false>(given, token, p.group_tokens - place, row, column);
    }
}
