// Grouped products without tensor cores: NUMERICS.md, "F32", for every element type, and FP8 blocks.
//
// A block computes tiles of 64 x 64 outputs, one after the other, a thread 4 x 4 of each; 16 terms of the chain at a
// time lie in shared memory as f32. The chain ends where it ends: unlike a tensor core, fma tells a zero term of one
// sign from none.
//
// Constants: RAGGED_CHAIN, ACCUMULATE; A_CHAIN_LAST, B_CHAIN_LAST (the chain's dimension is the last in memory).
// Params: as tiles.cuh, and a_sources, b_sources (rows to gather from). With scales: as fp8_block_scales.cuh.

constexpr u32 SIMT_THREADS = 256;
constexpr u32 SIMT_TILE = 64, SIMT_CHAIN = 16, SIMT_EACH = 4;

// 16 terms of 64 rows of a factor. A row's padding keeps 16-byte alignment and spreads the banks.
struct SimtFactor {
    float terms[SIMT_CHAIN][SIMT_TILE + 4];

    // `element(row, term)` for each of the tile's rows and terms that exist, threads along the dimension that is last
    // in memory.
    template <bool CHAIN_LAST, class Element>
    __device__ __forceinline__ void load(u32 rows, u32 count, Element element) {
#pragma unroll
        for (u32 i = threadIdx.x; i < SIMT_TILE * SIMT_CHAIN; i += SIMT_THREADS) {
            const u32 row = CHAIN_LAST ? i / SIMT_CHAIN : i % SIMT_TILE;
            const u32 term = CHAIN_LAST ? i % SIMT_CHAIN : i / SIMT_TILE;
            if (row < rows && term < count) terms[term][row] = element(row, term);
        }
    }

    __device__ __forceinline__ float4 quad(u32 term, u32 first) const {
        return *reinterpret_cast<const float4*>(&terms[term][first]);
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
__device__ __forceinline__ void fma_terms(const SimtFactor& a, const SimtFactor& b, u32 row, u32 column, u32 count,
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
    const Params& p = given.params;
    float x[SIMT_EACH] = {}, y[SIMT_EACH] = {};
#pragma unroll
    for (u32 i = 0; i < SIMT_EACH; i++) {
        if (row + i < tile.rows) x[i] = given.a_scale[row_scale_place(p, tile.row + row + i, term)];
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

__device__ __forceinline__ void simt_grouped_gemm(const Given& given) {
    __shared__ SimtFactor a, b;
    const Params& p = given.params;
    const u32 row = threadIdx.x / (SIMT_TILE / SIMT_EACH) * SIMT_EACH;
    const u32 column = threadIdx.x % (SIMT_TILE / SIMT_EACH) * SIMT_EACH;
    Tiles<SIMT_TILE, SIMT_TILE> tiles(given);
    Tile tile;
    for (u64 index = blockIdx.x; tiles.find(index, tile); index += gridDim.x) {
        if (ACCUMULATE && tile.terms == 0) continue;
        const auto* matrix = given.b + (RAGGED_CHAIN ? 0 : u64(tile.group) * p.columns * p.chain);
        // Under FP8 blocks the present part, and the sum of those before.
        float acc[SIMT_EACH][SIMT_EACH] = {}, total[SIMT_EACH][SIMT_EACH] = {};
        for (u32 done = 0; done < tile.terms; done += SIMT_CHAIN) {
            const u32 term = tile.first + done, count = min(tile.terms - done, SIMT_CHAIN);
            __syncthreads();
            a.load<A_CHAIN_LAST>(tile.rows, count, [&](u32 r, u32 t) {
                return element_at<A_CHAIN_LAST, a_gather_given>(given.a, given.a_gather, p.a_sources, tile.row + r,
                                                                p.rows, term + t, p.chain);
            });
            b.load<B_CHAIN_LAST>(p.columns - tile.column, count, [&](u32 c, u32 t) {
                return element_at<B_CHAIN_LAST, b_gather_given>(matrix, given.b_gather, p.b_sources, tile.column + c,
                                                                p.columns, term + t, p.chain);
            });
            __syncthreads();
            fma_terms(a, b, row, column, count, acc);
            if (a_scale_given && ((done + SIMT_CHAIN) % BLOCK == 0 || done + SIMT_CHAIN >= tile.terms)) {
                end_part(given, tile, row, column, term, acc, total);
            }
        }
#pragma unroll
        for (u32 i = 0; i < SIMT_EACH; i++) {
#pragma unroll
            for (u32 j = 0; j < SIMT_EACH; j++) {
                if (row + i < tile.rows && tile.column + column + j < p.columns) {
                    const u64 at = out_place(p, tile.group, tile.row + row + i, tile.column + column + j);
                    put(given.out, at, a_scale_given ? total[i][j] : acc[i][j]);
                }
            }
        }
    }
}
