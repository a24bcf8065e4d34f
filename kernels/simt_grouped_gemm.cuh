// Grouped products without tensor cores: NUMERICS.md, "F32", for every element type, FP8 blocks, and split factors.
//
// A block computes square tiles of outputs, one after the other, a thread 4 x 4 of each; 32 terms of the chain at a time
// lie in shared memory as f32, while the next ones are on their way to registers. The chain ends where it ends: unlike a
// tensor core, fma tells a zero term of one sign from none.
//
// Constants: RAGGED_CHAIN, ACCUMULATE; A_CHAIN_LAST, B_CHAIN_LAST (the chain's dimension is the last in memory); A_SPLIT,
// B_SPLIT (see chain.cuh). Scalars: as tiles.cuh, and a_sources, b_sources (rows to gather from). With scales: as fp8_block_scales.cuh.

constexpr u32 SIMT_CHAIN = 32, SIMT_EACH = 4;

template <u32 TILE>
constexpr u32 SIMT_THREADS = TILE / SIMT_EACH * (TILE / SIMT_EACH);

// The terms of a tile's rows of a factor. A row's padding keeps 16-byte alignment and spreads the banks.
template <u32 TILE>
struct SimtFactor {
    static constexpr u32 THREADS = SIMT_THREADS<TILE>, MINE = TILE * SIMT_CHAIN / THREADS;

    float terms[SIMT_CHAIN][TILE + 4];

    // A thread's share: `element(row, term)` for each of the tile's rows and terms that exist, threads along the
    // dimension that is last in memory.
    template <bool CHAIN_LAST, class Element>
    static __device__ __forceinline__ void fetch(float (&mine)[MINE], u32 rows, u32 count, Element element) {
#pragma unroll
        for (u32 i = 0; i < MINE; i++) {
            const u32 row = row_of<CHAIN_LAST>(i), term = term_of<CHAIN_LAST>(i);
            mine[i] = row < rows && term < count ? element(row, term) : 0.0f;
        }
    }

    template <bool CHAIN_LAST>
    __device__ __forceinline__ void put(const float (&mine)[MINE]) {
#pragma unroll
        for (u32 i = 0; i < MINE; i++) terms[term_of<CHAIN_LAST>(i)][row_of<CHAIN_LAST>(i)] = mine[i];
    }

    __device__ __forceinline__ float4 quad(u32 term, u32 first) const {
        return *reinterpret_cast<const float4*>(&terms[term][first]);
    }

   private:
    template <bool CHAIN_LAST>
    static __device__ __forceinline__ u32 row_of(u32 i) {
        const u32 at = threadIdx.x + i * THREADS;
        return CHAIN_LAST ? at / SIMT_CHAIN : at % TILE;
    }

    template <bool CHAIN_LAST>
    static __device__ __forceinline__ u32 term_of(u32 i) {
        const u32 at = threadIdx.x + i * THREADS;
        return CHAIN_LAST ? at % SIMT_CHAIN : at / TILE;
    }
};

// A factor's element: 0 if its row is gathered from outside of the tensor.
template <bool CHAIN_LAST, bool GATHER, class Element>
__device__ __forceinline__ float element_at(const Element* matrix, const u32* gather, u32 sources, u32 row, u32 rows,
                                            u32 term, u32 chain) {
    // The ragged dimension is the one that is gathered.
    u32 slow = CHAIN_LAST ? row : term;
    if (GATHER) {
        slow = gather[slow];
        if (slow >= sources) return 0.0f;
    }
    return to_f32(matrix[u64(slow) * (CHAIN_LAST ? chain : rows) + (CHAIN_LAST ? term : row)]);
}

// 4 x 4 outputs: acc = fma(a, b, acc) for each of the terms, in order.
template <u32 TILE>
__device__ __forceinline__ void fma_terms(const SimtFactor<TILE>& a, const SimtFactor<TILE>& b, u32 row, u32 column, u32 count,
                                          float (&acc)[SIMT_EACH][SIMT_EACH]) {
#pragma unroll
    for (u32 t = 0; t < SIMT_CHAIN; t++) {
        if (t == count) break;
        const float4 x = a.quad(t, row), y = b.quad(t, column);
        const float left[SIMT_EACH] = {x.x, x.y, x.z, x.w}, right[SIMT_EACH] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (u32 i = 0; i < SIMT_EACH; i++) {
#pragma unroll
            for (u32 j = 0; j < SIMT_EACH; j++) acc[i][j] = __fmaf_rn(left[i], right[j], acc[i][j]);
        }
    }
}

// FP8 blocks: total = fma(part, scale_a * scale_b, total), and the next part begins.
__device__ __forceinline__ void end_part(const Given& given, const Tile& tile, u32 row, u32 column, u32 term,
                                         float (&part)[SIMT_EACH][SIMT_EACH], float (&total)[SIMT_EACH][SIMT_EACH]) {
    const Scalars& p = given.scalars;
    float x[SIMT_EACH] = {}, y[SIMT_EACH] = {};
#pragma unroll
    for (u32 i = 0; i < SIMT_EACH; i++) {
        const u32 source = row + i < tile.rows ? scaled_row(given, tile.row + row + i) : NONE;
        if (source != NONE) x[i] = given.a_scale[row_scale_place(p, source, term)];
        const u32 c = tile.column + column + i;
        if (c < p.columns) y[i] = given.b_scale[column_scale_place(p, tile.group, c, term)];
    }
#pragma unroll
    for (u32 i = 0; i < SIMT_EACH; i++) {
#pragma unroll
        for (u32 j = 0; j < SIMT_EACH; j++) {
            total[i][j] = __fmaf_rn(part[i][j], x[i] * y[j], total[i][j]);
            part[i][j] = 0.0f;
        }
    }
}

// Split factors: total = total + part, and the next part begins.
__device__ __forceinline__ void end_part(float (&part)[SIMT_EACH][SIMT_EACH], float (&total)[SIMT_EACH][SIMT_EACH]) {
#pragma unroll
    for (u32 i = 0; i < SIMT_EACH; i++) {
#pragma unroll
        for (u32 j = 0; j < SIMT_EACH; j++) {
            total[i][j] += part[i][j];
            part[i][j] = 0.0f;
        }
    }
}

// By `SIMT_THREADS<TILE>` threads.
template <u32 TILE>
__device__ __forceinline__ void simt_grouped_gemm(const Given& given) {
    __shared__ SimtFactor<TILE> a, b;
    const Scalars& p = given.scalars;
    const u32 row = threadIdx.x / (TILE / SIMT_EACH) * SIMT_EACH;
    const u32 column = threadIdx.x % (TILE / SIMT_EACH) * SIMT_EACH;
    Walk walk;
    Tiles<TILE, TILE> tiles(given, walk);
    Tile tile;
    for (u64 index = blockIdx.x; tiles.find(index, tile); index += gridDim.x) {
        if (ACCUMULATE && tile.terms == 0) continue;
        const u64 a_plane = u64(p.rows) * p.chain, b_plane = u64(RAGGED_CHAIN ? 1 : p.groups) * p.columns * p.chain;
        const auto* matrix = given.b + (RAGGED_CHAIN ? 0 : u64(tile.group) * p.columns * p.chain);
        // Of a product in parts (FP8 blocks, split factors) the present one, and the sum of those before.
        float acc[SIMT_EACH][SIMT_EACH] = {}, total[SIMT_EACH][SIMT_EACH] = {};
        float next_a[SimtFactor<TILE>::MINE], next_b[SimtFactor<TILE>::MINE];
        const auto fetch = [&](const Chain<SIMT_CHAIN>& chain) {
            const u32 term = tile.first + chain.done, count = min(chain.left(), SIMT_CHAIN);
            const auto* left = given.a + chain.a_plane() * a_plane;
            const auto* right = matrix + chain.b_plane() * b_plane;
            SimtFactor<TILE>::template fetch<A_CHAIN_LAST>(next_a, tile.rows, count, [&](u32 r, u32 t) {
                return element_at<A_CHAIN_LAST, a_gather_given>(left, given.a_gather, p.a_sources, tile.row + r,
                                                                p.rows, term + t, p.chain);
            });
            SimtFactor<TILE>::template fetch<B_CHAIN_LAST>(next_b, p.columns - tile.column, count, [&](u32 c, u32 t) {
                return element_at<B_CHAIN_LAST, b_gather_given>(right, given.b_gather, p.b_sources, tile.column + c,
                                                                p.columns, term + t, p.chain);
            });
        };
        Chain<SIMT_CHAIN> chain(tile.terms);
        if (chain.more()) fetch(chain);
        while (chain.more()) {
            const u32 done = chain.done, count = min(chain.left(), SIMT_CHAIN);
            const bool ends = chain.ends();
            __syncthreads();
            a.template put<A_CHAIN_LAST>(next_a);
            b.template put<B_CHAIN_LAST>(next_b);
            __syncthreads();
            chain.next();
            if (chain.more()) fetch(chain);
            fma_terms(a, b, row, column, count, acc);
            if (a_scale_given && ((done + SIMT_CHAIN) % BLOCK == 0 || done + SIMT_CHAIN >= tile.terms)) {
                end_part(given, tile, row, column, tile.first + done, acc, total);
            }
            if (SPLIT && ends) end_part(acc, total);
        }
#pragma unroll
        for (u32 i = 0; i < SIMT_EACH; i++) {
#pragma unroll
            for (u32 j = 0; j < SIMT_EACH; j++) {
                if (row + i < tile.rows && tile.column + column + j < p.columns) {
                    const u64 at = out_place(p, tile.group, tile.row + row + i, tile.column + column + j);
                    put(given.out, at, a_scale_given || SPLIT ? total[i][j] : acc[i][j]);
                }
            }
        }
    }
}
