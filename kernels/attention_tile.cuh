// The frame of attention on tensor cores: tiles of bf16 operands in shared memory, brought in by one warpgroup, and the
// two products of the others with them. After sm90.cuh, ring.cuh,
// tensor_core_step.cuh and attention_visible.cuh.
//
// A tile [rows, columns] lies in spans of 64 columns: [columns / 64][rows][64], 128 bytes a row, swizzled as sm90.cuh
// says. So it serves the chains along its columns (Major::CHAIN) and those along its rows (Major::ROWS) alike.
//
// BOXES: TMA brings the tiles, which takes 16-byte aligned heads; else threads do, element by element.
//
// Where there is no `wgmma` the same fragments go through `mma.sync`. That path was never run.

constexpr u32 SPAN = 64;
constexpr u32 SPAN_BYTES = SPAN * sizeof(bf16);
constexpr u32 WARPGROUP = 128;

// The first warpgroup of a thread block produces tiles, WARPGROUPS consume them.
constexpr u32 THREADS = (1 + WARPGROUPS) * WARPGROUP;
// One warp commands TMA.
constexpr u32 PRODUCERS = BOXES ? LANES : WARPGROUP;
// 64512 in all.
constexpr u32 PRODUCER_REGISTERS = BOXES ? 24 : 56, CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / WARPGROUPS / 8 * 8;

__device__ constexpr u32 tile_bytes(u32 rows, u32 columns) { return (columns + SPAN - 1) / SPAN * rows * SPAN_BYTES; }

// ---- What a thread block works on ----

struct Work {
    // Of WARPGROUPS blocks of rows or keys.
    u32 tile;
    u32 batch, head;
};

// Heads whose rows that go by together fill this much of the L2 cache are worked on at a time, so that thread blocks read
// them from there.
constexpr u64 CACHE_SHARE = 32 << 20;

// The work of a number, of `tiles` tiles of each of the launch's heads: `each` of them for each key head. All tiles
// of some heads come one after the other: the first of each of them, then the second, and so on. `readers` neighbouring
// heads read the same rows of `readable` heads.
__device__ __forceinline__ Work work_of(u32 number, const Scalars& p, u32 tiles, u32 each, u32 readers, u32 readable) {
    const u32 all = p.count * each, heads = p.kv_heads * each;
    const u64 bytes = static_cast<u64>(p.sequence) * (p.qk_dim + p.v_dim) * sizeof(bf16) * readable;
    const u32 together = static_cast<u32>(min(max(CACHE_SHARE / bytes, 1ull) * readers, static_cast<u64>(all)));
    const u32 group = number / (together * tiles), within = number % (together * tiles);
    const u32 count = min(together, all - group * together), head = p.from * each + group * together + within % count;
    return {within / count, head / heads, head % heads};
}

// The same for tiles of `rows` rows of query heads: those that see most come first.
__device__ __forceinline__ Work row_work_of(u32 number, const Scalars& p, u32 rows) {
    const u32 tiles = (p.sequence + rows - 1) / rows, members = p.heads / p.kv_heads;
    Work work = work_of(number, p, tiles, members, members, 1);
    work.tile = tiles - 1 - work.tile;
    return work;
}

// ---- Slopes that wait in device memory ----

// The gradients of the scores of a block of rows with a block of keys, rounded: [64][64], swizzled as a tile of one span.
constexpr u32 SLOPES = BLOCK * BLOCK, SLOPES_BYTES = SLOPES * sizeof(bf16);

// Where those of a block of rows start, key block after key block up to its own. Those of each of the launch's heads follow
// each other.
__device__ __forceinline__ u64 slopes_of(const Scalars& p, u32 batch, u32 head, u32 block) {
    const u64 before = static_cast<u64>(batch) * p.heads + head - static_cast<u64>(p.from) * (p.heads / p.kv_heads);
    const u64 blocks = p.blocks;
    return (before * (blocks * (blocks + 1) / 2) + static_cast<u64>(block) * (block + 1) / 2) * SLOPES;
}

// ---- The ring ----

// Who arrives where a stage is left: a lane for its warp, or every lane. Both are enough; but `racecheck` does not see that
// a lane has read what another one arrives for, where lanes read and not only the tensor cores.
enum class Leavers : u32 { WARPS = WARPGROUPS * WARPGROUP / LANES, THREADS = WARPGROUPS * WARPGROUP };

// The stages' barriers: filled by the producers, and left by the consumers.
template <Leavers LEAVERS>
struct Ring {
    u64 full[STAGES];
    u64 empty[STAGES];

    __device__ void init() {
        for (u32 stage = 0; stage < STAGES; stage++) {
            barrier_init(full + stage, PRODUCERS);
            barrier_init(empty + stage, u32(LEAVERS));
        }
        barrier_init_done();
    }

    // By the producers, before they fill the stage.
    __device__ __forceinline__ void wait_empty(const Place& place) { barrier_wait(empty + place.stage, place.parity ^ 1); }

    // By the consumers, before they read it.
    __device__ __forceinline__ void wait_full(const Place& place) { barrier_wait(full + place.stage, place.parity); }

    // By a warp that reads the stage no more.
    __device__ __forceinline__ void leave(u32 stage) {
        if constexpr (LEAVERS == Leavers::THREADS) {
            barrier_arrive(empty + stage);
        } else {
            __syncwarp();
            if (lane_id() == 0) barrier_arrive(empty + stage);
        }
    }
};

// ---- Producers ----

// A tensor [batch, sequence, heads, dim]. `map`: its boxes [rows of a tile, 64 columns].
struct Source {
    const bf16* elements;
    const TensorMap* map;
    u32 heads, dim;
};

// Starts to bring in the rows from `row` on of a head; what lies beyond the sequence and the head becomes zero. By all
// producers, before they arrive at `full`.
template <u32 ROWS, u32 COLUMNS>
__device__ __forceinline__ void bring(u32 tile, u64* full, const Source& source, const Scalars& p, u32 batch, u32 head, u32 row) {
    if (BOXES) {
        if (threadIdx.x > 0) return;
        barrier_expect(full, tile_bytes(ROWS, COLUMNS));
#pragma unroll
        for (u32 column = 0; column < COLUMNS; column += SPAN) {
            copy_box(tile + column / SPAN * ROWS * SPAN_BYTES, *source.map, full, column, head, row, batch);
        }
        return;
    }
    const u64 stride = static_cast<u64>(source.heads) * source.dim;
    const bf16* first = source.elements + static_cast<u64>(batch) * p.sequence * stride + static_cast<u64>(head) * source.dim;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS * COLUMNS / 2; i += WARPGROUP) {
        const u32 r = i / (COLUMNS / 2), column = i % (COLUMNS / 2) * 2;
        const auto element = [&](u32 c) -> u32 {
            return row + r < p.sequence && c < source.dim ? first[(row + r) * stride + c].bits : 0;
        };
        const u32 to = tile + column / SPAN * ROWS * SPAN_BYTES + swizzled(r * SPAN_BYTES + column % SPAN * 2);
        store_shared(to, element(column) | element(column + 1) << 16);
    }
}

// By all producers: what they stored is there, and what they brought will be when it has come.
__device__ __forceinline__ void brought(u64* full) {
    if (!BOXES) fence_async();
    barrier_arrive(full);
}

// ---- Consumers ----

// The consumer warpgroup, known to be the same in all lanes.
__device__ __forceinline__ u32 consumer() { return __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP - 1, 0); }

// This thread's upper row of the 64 of its warpgroup; the lower one is 8 below.
__device__ __forceinline__ u32 row_in_block() { return threadIdx.x % WARPGROUP / LANES * 16 + lane_id() / 4; }

// Rounded to the operands' type: the accumulators of 64 rows become left factors.
template <u32 STEPS>
__device__ __forceinline__ void pack(u32 (&a)[STEPS][4], const float (&d)[STEPS * 8]) {
#pragma unroll
    for (u32 i = 0; i < STEPS * 4; i++) a[i / 4][i % 4] = bf16_pair(d[2 * i], d[2 * i + 1]);
}

template <u32 COUNT>
__device__ __forceinline__ void clear(float (&d)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) d[i] = 0.0f;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The chains of 64 rows of `a` with 2 COUNT rows of `b` along DEPTH columns, from zero. A_ROWS, B_ROWS: those of the whole
// tiles.
template <u32 DEPTH, u32 A_ROWS, u32 B_ROWS, u32 COUNT>
__device__ __forceinline__ void multiply_rows(float (&d)[COUNT], u32 a, u32 b) {
    // Else the compiler would keep the descriptors of every step in registers from tile to tile.
    asm volatile("" : "+r"(a));
    const u64 left = descriptor(a), right = descriptor(b);
#pragma unroll
    for (u32 k = 0; k < DEPTH; k += STEP) {
        const u32 span = k / SPAN * SPAN_BYTES, within = k % SPAN * 2;
        Wgmma<2 * COUNT>::template bf16_shared<Major::CHAIN, Major::CHAIN>(
            d, advanced(left, span * A_ROWS + within), advanced(right, span * B_ROWS + within), k > 0);
    }
}

// The chains go on with steps BEGIN to END - 1 of `a` in registers; the first step of all takes the rows of `b` from `row`
// on, a multiple of 16.
template <u32 B_ROWS, u32 BEGIN, u32 END, u32 COUNT, u32 STEPS>
__device__ __forceinline__ void multiply_steps(float (&d)[COUNT], const u32 (&a)[STEPS][4], u32 b, u32 row) {
    const u64 right = descriptor(b + row * SPAN_BYTES, B_ROWS * SPAN_BYTES);
#pragma unroll
    for (u32 i = BEGIN; i < END; i++) {
        Wgmma<2 * COUNT>::template bf16_registers<Major::ROWS>(d, a[i], advanced(right, i * STEP * SPAN_BYTES), true);
    }
}

// The chains of 64 rows of `a`, a tile [64, 64], go on with the 64 rows of `b`.
template <u32 COUNT>
__device__ __forceinline__ void multiply_block(float (&d)[COUNT], u32 a, u32 b) {
    const u64 left = descriptor(a), right = descriptor(b, BLOCK * SPAN_BYTES);
#pragma unroll
    for (u32 i = 0; i < BLOCK / STEP; i++) {
        Wgmma<2 * COUNT>::template bf16_shared<Major::CHAIN, Major::ROWS>(
            d, advanced(left, i * STEP * 2), advanced(right, i * STEP * SPAN_BYTES), true);
    }
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
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(high) : "r"(tile + swizzled(offset + SPAN_BYTES)) : "memory");
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
        const u32 span = k / SPAN * SPAN_BYTES, within = k % SPAN_BYTES + lane % 4 * 4;
        const auto pair = [&](u32 tile, u32 rows, u32 row, u32 next) {
            return load_pair(tile + span * rows + swizzled(row * SPAN_BYTES + within + next * 16));
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

template <u32 B_ROWS, u32 BEGIN, u32 END, u32 COUNT, u32 STEPS>
__device__ __forceinline__ void multiply_steps(float (&d)[COUNT], const u32 (&a)[STEPS][4], u32 b, u32 row) {
    const u32 lane = lane_id();
#pragma unroll
    for (u32 step = BEGIN; step < END; step++) {
#pragma unroll
        for (u32 i = 0; i < COUNT / 4; i++) {
            const u32 at = (row + step * STEP + lane % 4 * 2) * SPAN_BYTES + (8 * i % SPAN + lane / 4) * 2;
            const u32 tile = b + 8 * i / SPAN * B_ROWS * SPAN_BYTES;
            mma(d + 4 * i, a[step], load_column_pair(tile, at), load_column_pair(tile, at + 8 * SPAN_BYTES));
        }
    }
}

template <u32 COUNT>
__device__ __forceinline__ void multiply_block(float (&d)[COUNT], u32 a, u32 b) {
    const u32 row = threadIdx.x % WARPGROUP / LANES * 16 + lane_id() / 4;
    u32 left[BLOCK / STEP][4];
#pragma unroll
    for (u32 i = 0; i < BLOCK / STEP * 4; i++) {
        const u32 at = (row + i % 2 * 8) * SPAN_BYTES + i / 2 * 16 + lane_id() % 4 * 4;
        left[i / 4][i % 4] = load_pair(a + swizzled(at));
    }
    multiply_steps<BLOCK, 0, BLOCK / STEP>(d, left, b, 0);
}

// These products are done as soon as they are written down, by threads that keep their registers.

template <class... Registers>
__device__ __forceinline__ void wgmma_begin(Registers&...) {}

__device__ __forceinline__ void wgmma_commit() {}

template <u32 PENDING, class... Registers>
__device__ __forceinline__ void wgmma_wait(Registers&...) {}

template <u32 REGISTERS>
__device__ __forceinline__ void registers_give() {}

template <u32 REGISTERS>
__device__ __forceinline__ void registers_take() {}

#endif

// The first warpgroup does `produce`, the others `consume`, once the barriers that thread 0 has made are there.
template <class Produce, class Consume>
__device__ __forceinline__ void take_roles(Produce produce, Consume consume) {
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        registers_give<PRODUCER_REGISTERS>();
        if (threadIdx.x < PRODUCERS) produce();
    } else {
        registers_take<CONSUMER_REGISTERS>();
        consume();
    }
}

// Stores accumulators to a head in a tensor [tokens, heads * dim]: `result(half, i)` of element i of the upper and the lower
// row; `row` is this thread's upper row.
template <u32 COLUMNS, class Result>
__device__ __forceinline__ void store_rows(bf16* x, u32 heads, u32 dim, u64 token, u32 sequence, u32 head, u32 row, Result result) {
    const u64 stride = static_cast<u64>(heads) * dim;
    bf16* first = x + token * stride + static_cast<u64>(head) * dim;
    const bool pairs = reinterpret_cast<u64>(x) % 4 == 0 && dim % 2 == 0;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        if (row + 8 * half >= sequence) continue;
        bf16* to = first + (row + 8 * half) * stride;
#pragma unroll
        for (u32 i = 0; i < COLUMNS / 8; i++) {
            const u32 column = 8 * i + threadIdx.x % 4 * 2;
            const float left = result(half, 4 * i + 2 * half), right = result(half, 4 * i + 2 * half + 1);
            if (pairs && column < dim) {
                *reinterpret_cast<u32*>(to + column) = bf16_pair(left, right);
            } else {
                if (column < dim) store(to, column, left);
                if (column + 1 < dim) store(to, column + 1, right);
            }
        }
    }
}
