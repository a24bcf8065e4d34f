// Tiles of attention's bf16 operands in shared memory, and the two products of a warpgroup with them. After sm90.cuh
// and attention_visible.cuh.
//
// A tile [rows, columns] lies in spans of 64 columns: [columns / 64][rows][64], 128 bytes a row, swizzled as sm90.cuh
// says. So it serves the chains along its columns (Major::CHAIN) and those along its rows (Major::ROWS) alike.
//
// Where there is no `wgmma` the same fragments go through `mma.sync`. That path was never run.

constexpr u32 SPAN = 64;
// Products that one step of a chain adds.
constexpr u32 STEP = 16;
constexpr u32 WARPGROUP = 128;

__device__ constexpr u32 tile_bytes(u32 rows, u32 columns) { return (columns + SPAN - 1) / SPAN * rows * SPAN * 2; }

// Rows of one head: `count` of `dim` elements, `stride` elements apart.
struct Rows {
    const bf16* first;
    u64 stride;
    u32 count, dim;

    __device__ __forceinline__ bf16 at(u32 row, u32 column) const {
        return row < count && column < dim ? first[row * stride + column] : bf16{0};
    }
};

// The rows from `row` on of a head in a tensor [tokens, heads * dim], at most `limit`; `token` is the sequence's first.
__device__ __forceinline__ Rows rows_of(const bf16* x, u32 heads, u32 dim, u64 token, u32 sequence, u32 head, u32 row) {
    const u64 stride = static_cast<u64>(heads) * dim;
    const u32 count = row < sequence ? sequence - row : 0;
    return {x + (count > 0 ? (token + row) * stride + static_cast<u64>(head) * dim : 0), stride, count, dim};
}

// Whether every row of every head starts at a multiple of 16 bytes and ends at one.
__device__ __forceinline__ bool in_vectors(const bf16* x, u32 dim) { return reinterpret_cast<u64>(x) % 16 == 0 && dim % 8 == 0; }

// All threads of the block start to copy ROWS rows; the place beyond the rows and the columns that there are becomes
// zero. `vectors`: see in_vectors.
template <u32 ROWS, u32 COLUMNS, u32 THREADS>
__device__ __forceinline__ void load_tile(u32 tile, const Rows& rows, bool vectors) {
    constexpr u32 VECTORS = COLUMNS / 8;
    for (u32 i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
        const u32 row = i / VECTORS, column = i % VECTORS * 8;
        const u32 to = tile + column / SPAN * (ROWS * SPAN * 2) + swizzled(row * SPAN * 2 + column % SPAN * 2);
        if (vectors) {
            const bool there = row < rows.count && column < rows.dim;
            copy_async_16(to, rows.first + (there ? row * rows.stride + column : 0), there ? 16 : 0);
        } else {
            u32 pairs[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                pairs[j] = rows.at(row, column + 2 * j).bits | static_cast<u32>(rows.at(row, column + 2 * j + 1).bits) << 16;
            }
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]),
                         "r"(pairs[3])
                         : "memory");
        }
    }
}

// Waits for the copies of all threads of the block and shows them to the tensor cores.
__device__ __forceinline__ void tiles_ready() {
    copies_wait<0>();
    fence_async();
    __syncthreads();
}

// Accumulators of 64 rows and COLUMNS columns, in pieces that one instruction takes. COLUMNS is 16, 32 or a multiple of 64.
// Thread t of the warpgroup has in piece[p][4 i + 2 h + j] row 16 (t / 32) + 8 h + t % 32 / 4 and column
// 64 p + 8 i + 2 (t % 4) + j.
template <u32 COLUMNS>
struct Accumulator {
    static constexpr u32 PIECE = COLUMNS < SPAN ? COLUMNS : SPAN;
    static constexpr u32 PIECES = COLUMNS / PIECE;
    static_assert(COLUMNS % PIECE == 0 && PIECE % 16 == 0);

    float piece[PIECES][PIECE / 2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 p = 0; p < PIECES; p++) {
#pragma unroll
            for (u32 i = 0; i < PIECE / 2; i++) piece[p][i] = 0.0f;
        }
    }

    // Multiplies this thread's upper and lower row.
    __device__ __forceinline__ void scale(float upper, float lower) {
#pragma unroll
        for (u32 p = 0; p < PIECES; p++) {
#pragma unroll
            for (u32 i = 0; i < PIECE / 2; i++) piece[p][i] *= i / 2 % 2 == 0 ? upper : lower;
        }
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The chains of 64 rows of `a` with 2 COUNT rows of `b` along DEPTH columns, from zero. A_ROWS, B_ROWS: those of the whole
// tiles. Between products_begin and products_done.
template <u32 DEPTH, u32 A_ROWS, u32 B_ROWS, u32 COUNT>
__device__ __forceinline__ void multiply_rows(float (&d)[COUNT], u32 a, u32 b) {
    const u64 left = descriptor(a), right = descriptor(b);
#pragma unroll
    for (u32 k = 0; k < DEPTH; k += STEP) {
        const u32 span = k / SPAN * SPAN * 2, within = k % SPAN * 2;
        Wgmma<2 * COUNT>::template bf16_shared<Major::CHAIN, Major::CHAIN>(
            d, advanced(left, span * A_ROWS + within), advanced(right, span * B_ROWS + within), k > 0);
    }
}

// The chains go on with a step of `a` in registers and the 16 rows of `b` from `row` on, a multiple of 16. Between
// products_begin and products_done.
template <u32 B_ROWS, u32 COLUMNS>
__device__ __forceinline__ void multiply_step(Accumulator<COLUMNS>& d, const u32 (&a)[4], u32 b, u32 row) {
    const u64 right = descriptor(b + row * SPAN * 2);
#pragma unroll
    for (u32 p = 0; p < Accumulator<COLUMNS>::PIECES; p++) {
        Wgmma<Accumulator<COLUMNS>::PIECE>::template bf16_registers<Major::ROWS>(
            d.piece[p], a, advanced(right, p * B_ROWS * SPAN * 2), true);
    }
}

template <u32 COLUMNS>
__device__ __forceinline__ void pin(Accumulator<COLUMNS>& d) {
#pragma unroll
    for (u32 p = 0; p < Accumulator<COLUMNS>::PIECES; p++) pin(d.piece[p]);
}

template <u32 STEPS>
__device__ __forceinline__ void pin(u32 (&a)[STEPS][4]) {
#pragma unroll
    for (u32 i = 0; i < STEPS * 4; i++) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// Products of these registers may start.
template <class... Registers>
__device__ __forceinline__ void products_begin(Registers&... registers) {
    (pin(registers), ...);
    wgmma_begin();
}

// Their results are there.
template <class... Registers>
__device__ __forceinline__ void products_done(Registers&... registers) {
    wgmma_commit();
    wgmma_wait<0>();
    (pin(registers), ...);
}

#else

__device__ __forceinline__ u32 load_pair(u32 from) {
    u32 pair;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(from) : "memory");
    return pair;
}

// The elements of two neighbouring rows in one column.
__device__ __forceinline__ u32 load_column_pair(u32 tile, u32 offset) {
    u16 low, high;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(low) : "r"(tile + swizzled(offset)) : "memory");
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(high) : "r"(tile + swizzled(offset + SPAN * 2)) : "memory");
    return low | static_cast<u32>(high) << 16;
}

// One step of 16 rows and 8 columns.
__device__ __forceinline__ void mma(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <u32 DEPTH, u32 A_ROWS, u32 B_ROWS, u32 COUNT>
__device__ __forceinline__ void multiply_rows(float (&d)[COUNT], u32 a, u32 b) {
    const u32 lane = lane_id(), warp_row = threadIdx.x % WARPGROUP / LANES * 16;
    for (u32 i = 0; i < COUNT; i++) d[i] = 0.0f;
#pragma unroll
    for (u32 k = 0; k < DEPTH; k += STEP) {
        const u32 span = k / SPAN * SPAN * 2, within = k % SPAN * 2 + lane % 4 * 4;
        const auto pair = [&](u32 tile, u32 rows, u32 row, u32 next) {
            return load_pair(tile + span * rows + swizzled(row * SPAN * 2 + within + next * 16));
        };
        const u32 row = warp_row + lane / 4;
        const u32 left[4] = {pair(a, A_ROWS, row, 0), pair(a, A_ROWS, row + 8, 0), pair(a, A_ROWS, row, 1),
                             pair(a, A_ROWS, row + 8, 1)};
#pragma unroll
        for (u32 i = 0; i < COUNT / 4; i++) {
            const u32 column = 8 * i + lane / 4;
            mma(d + 4 * i, left, pair(b, B_ROWS, column, 0), pair(b, B_ROWS, column, 1));
        }
    }
}

template <u32 B_ROWS, u32 COLUMNS>
__device__ __forceinline__ void multiply_step(Accumulator<COLUMNS>& d, const u32 (&a)[4], u32 b, u32 row) {
    const u32 lane = lane_id();
#pragma unroll
    for (u32 p = 0; p < Accumulator<COLUMNS>::PIECES; p++) {
#pragma unroll
        for (u32 i = 0; i < Accumulator<COLUMNS>::PIECE / 8; i++) {
            const u32 at = (row + lane % 4 * 2) * SPAN * 2 + (8 * i + lane / 4) * 2, tile = b + p * B_ROWS * SPAN * 2;
            mma(d.piece[p] + 4 * i, a, load_column_pair(tile, at), load_column_pair(tile, at + 8 * SPAN * 2));
        }
    }
}

template <class... Registers>
__device__ __forceinline__ void products_begin(Registers&...) {}

template <class... Registers>
__device__ __forceinline__ void products_done(Registers&...) {}

#endif

// Stores rows of an accumulator to a head in a tensor [tokens, heads * dim]; `row` is this thread's upper row.
template <u32 COLUMNS, class Result>
__device__ __forceinline__ void store_rows(bf16* x, u32 heads, u32 dim, u64 token, u32 sequence, u32 head, u32 row, Result result) {
    using A = Accumulator<COLUMNS>;
    const u64 stride = static_cast<u64>(heads) * dim;
    const bool pairs = reinterpret_cast<u64>(x) % 4 == 0 && dim % 2 == 0;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        if (row + 8 * half >= sequence) continue;
        bf16* to = x + (token + row + 8 * half) * stride + static_cast<u64>(head) * dim;
#pragma unroll
        for (u32 p = 0; p < A::PIECES; p++) {
#pragma unroll
            for (u32 i = 0; i < A::PIECE / 8; i++) {
                const u32 column = p * SPAN + 8 * i + threadIdx.x % 4 * 2;
                const float left = result(half, p, 4 * i + 2 * half), right = result(half, p, 4 * i + 2 * half + 1);
                if (pairs && column < dim) {
                    *reinterpret_cast<u32*>(to + column) = bf16_pair(left, right);
                } else {
                    if (column < dim) store(to, column, left);
                    if (column + 1 < dim) store(to, column + 1, right);
                }
            }
        }
    }
}
