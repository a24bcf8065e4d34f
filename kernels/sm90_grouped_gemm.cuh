// The frame of the grouped products on Hopper's tensor cores: a ring of tiles in shared memory, filled by one warpgroup
// and read by two.
//
// A block computes tiles of 128 x TILE_COLUMNS outputs, one after the other; a consumer warpgroup has 64 rows of each.
// The chain goes by in pieces of 128 bytes (64 bf16, 128 e4m3), a stage of the ring each. TILE_COLUMNS = 256 reads
// 48 KiB of shared memory for 64 x 128 x 256 products, which is what the tensor cores need to stay busy; 4 stages then
// fill the 227 KiB of a multiprocessor. Outputs with few columns take 128 and 6 stages.
//
// The tiles' layouts are those of sm90.cuh. How a factor comes in is a constant:
//
//   BOXES     TMA: 16-byte aligned rows, no gather.
//   PIECES    asynchronous copies of 16 bytes by every thread: aligned rows, with or without gather.
//   ELEMENTS  one element after the other: anything.
//
// TMA ends a chain at the tensor's edge only. Where a group ends it (Wgrad), the last piece of the chain
// comes as PIECES, which become zero past the end: what lies there is selected away, not multiplied by zero. Two warps
// do that while TMA is at the next tile.
//
// Two blocks of a CLUSTER take neighbouring tiles. Where these have the same columns, each block's TMA brings
// half of them to both, so that the L2 cache is read for 32 KiB a stage instead of 48. A stage is empty when both have
// left it.
//
// The results go out as sm90_grouped_gemm_out.cuh says, while the producers fill the ring for the next tile.
//
// Constants: RAGGED_CHAIN, ACCUMULATE; A_CHAIN_LAST, B_CHAIN_LAST (the chain's dimension is the last in memory);
// A_SPLIT, B_SPLIT (see chain.cuh); A_LOAD, B_LOAD; STORE; TILE_COLUMNS, STAGES; CLUSTER (1, or 2 if b is BOXES,
// and a, too, where the groups divide the chain). Scalars: as tiles.cuh, and a_sources, b_sources (rows to gather from). Maps: a, b, out.

enum class Load : u32 { BOXES, PIECES, ELEMENTS };

constexpr u32 WARPGROUP = 128, WARPGROUP_ROWS = 64;
constexpr u32 CONSUMERS = 2;
constexpr u32 TILE_ROWS = CONSUMERS * WARPGROUP_ROWS;
constexpr u32 THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr u32 ROW_BYTES = 128, PIECE_BYTES = 16, PIECES_OF_ROW = ROW_BYTES / PIECE_BYTES;
constexpr u32 ELEMENT_BYTES = sizeof(*Given::a);
constexpr u32 TILE_CHAIN = ROW_BYTES / ELEMENT_BYTES;
// The part of the columns that each block of a cluster brings.
constexpr u32 PART_COLUMNS = TILE_COLUMNS / CLUSTER;
using OutTiles = Tiles<TILE_ROWS, TILE_COLUMNS, CLUSTER == 2>;
constexpr u32 A_BYTES = TILE_ROWS * ROW_BYTES, B_BYTES = TILE_COLUMNS * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
// In Major::ROWS: 64 rows for the whole piece of the chain.
constexpr u32 SLAB_ROWS = 64, SLAB_BYTES = TILE_CHAIN * ROW_BYTES;

// The barrier of threads at which those meet who copy what TMA does not.
constexpr u32 COPIERS_MEET = 1;

// Whether the scales of columns come with every piece of the chain: those of FP8 blocks, where the groups divide the chain.
constexpr bool SCALED = ELEMENT_BYTES == 1 && RAGGED_CHAIN;

// What a warp knows of its tiles, in shared memory: results and the addresses of copies leave it no registers for that.
struct Present {
    Walk walk;
    Tile tile;
    u64 index;

    __device__ __forceinline__ void advance() {
        // Read anew, lest it be kept in a register.
        u32 blocks;
        asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
        const u64 next = index + blocks;
        __syncwarp();
        index = next;
        __syncwarp();
    }
};

// The stages' barriers: filled by the producers, and left by the consumers' warps.
struct Ring {
    u64 full[STAGES];
    u64 empty[STAGES];
    alignas(16) float column_scales[SCALED ? STAGES : 1][SCALED ? TILE_COLUMNS : 1];
    Present of_warps[THREADS / LANES];

    // `arrivals` fill a stage.
    __device__ void init(u32 arrivals) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            barrier_init(full + stage, arrivals);
            barrier_init(empty + stage, CLUSTER * CONSUMERS * WARPGROUP / LANES);
        }
        barrier_init_done();
    }

    // By a warp that reads the stage no more.
    __device__ __forceinline__ void leave(u32 stage) {
        __syncwarp();
        if constexpr (CLUSTER == 1) {
            if (lane_id() == 0) barrier_arrive(empty + stage);
        } else {
            if (lane_id() < CLUSTER) barrier_arrive_in(lane_id(), empty + stage);
        }
    }

    // By a warp that reads nothing of a chain of this many terms.
    __device__ __forceinline__ void skip(Place& place, u32 terms) {
        for (Chain<TILE_CHAIN> chain(terms); chain.more(); chain.next()) {
            barrier_wait(full + place.stage, place.parity);
            leave(place.stage);
            place.advance();
        }
    }
};

// The consumer warpgroup's first row, known to be the same in all lanes.
__device__ __forceinline__ u32 first_row() {
    return __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP - 1, 0) * WARPGROUP_ROWS;
}

__device__ __forceinline__ Present& present_of(Ring& ring) { return ring.of_warps[threadIdx.x / LANES]; }

// The first tile of the ring. The slots of results follow the last.
__device__ __forceinline__ u32 ring_base() {
    extern __shared__ u8 dynamic_shared[];
    return (shared_address(dynamic_shared) + 1023) & ~1023u;
}

// One factor in memory.
struct Factor {
    const u8* elements;
    const u32* gather;
    const TensorMap* map;
    // As the product sees it. The last dimension in memory is one of them.
    u32 rows;
    u32 chain;
    // Rows to gather from.
    u32 sources;
    // Matrices of a plane, if each group has one of its own; else 0.
    u32 stacked;
};

// Whether threads copy of every piece of a chain: then the producers' whole warpgroup does. Else two warps copy the last
// piece of a chain that TMA cannot end, and the first one commands TMA.
constexpr bool STREAMED = Load{A_LOAD} != Load::BOXES || Load{B_LOAD} != Load::BOXES;
constexpr u32 LEADERS = STREAMED ? 0 : LANES;
constexpr u32 COPIERS = STREAMED ? WARPGROUP : RAGGED_CHAIN ? 2 * LANES : 0;
// 64512 registers in all. Beside a result's 128 registers, FP8 blocks need those of a part.
constexpr u32 PRODUCER_REGISTERS = ELEMENT_BYTES == 2 ? 72 : 40;
constexpr u32 CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / CONSUMERS;

// Brings in tiles of EXTENT rows of a factor. TMA brings PART rows at a time; copies take all copiers.
template <Load LOAD, Major MAJOR, bool GATHER, u32 EXTENT, u32 PART>
class Loader {
    static constexpr u32 ROWS_AT_ONCE = COPIERS / PIECES_OF_ROW;
    // TMA cannot end a chain where a group ends.
    static constexpr bool CUT = LOAD == Load::BOXES && RAGGED_CHAIN;
    static constexpr bool COPIES = LOAD != Load::BOXES || CUT;
    static constexpr u32 TURNS = COPIES ? EXTENT / ROWS_AT_ONCE : 1;
    // Whether a producer has the registers for all addresses at once: what is not the usual way gets none of them.
    static constexpr bool ROOM = ELEMENT_BYTES == 2 && Load{A_LOAD} != Load::ELEMENTS && Load{B_LOAD} != Load::ELEMENTS;
    // Gathered rows are looked up once for each tile, where there is room to remember them.
    static constexpr bool KNOWN = GATHER && MAJOR == Major::CHAIN && LOAD == Load::PIECES && ROOM;
    static constexpr u32 UNROLL = LOAD != Load::PIECES ? 1 : ROOM ? TURNS : TURNS / 2;

   public:
    static constexpr bool STORES = LOAD == Load::ELEMENTS;

    __device__ explicit Loader(const Factor& factor) : factor(factor) {}

    // Goes on with rows `first` to `first + count - 1` of a group; rows past them become zero, or anything. `shared`:
    // both blocks of the cluster need the same rows.
    __device__ __forceinline__ void begin(u32 group, u32 first, u32 count, bool shared) {
        row = first;
        rows = count;
        shares = shared;
        matrix = factor.stacked > 0 ? group : 0;
        base = factor.elements + u64(matrix) * factor.rows * factor.chain * ELEMENT_BYTES;
        elements = base;
        if constexpr (KNOWN) {
#pragma unroll
            for (u32 i = 0; i < TURNS; i++) known[i] = row_source(i);
        }
    }

    // Whether TMA brings a piece of the chain of which `left` terms exist.
    static __device__ __forceinline__ bool boxes(u32 left) {
        return LOAD == Load::BOXES && (!CUT || left >= TILE_CHAIN);
    }

    // Bytes that it will bring.
    static __device__ __forceinline__ u32 box_bytes(u32 left) { return boxes(left) ? EXTENT * ROW_BYTES : 0; }

    // The piece of the chain from `term` on, of which `left` terms exist, in a plane of the factor.
    __device__ __forceinline__ void load(u32 to, u64* barrier, u32 term, u32 left, u32 plane) {
        const u32 skipped = plane * max(factor.stacked, 1u);
        if (boxes(left)) {
            if (threadIdx.x == 0) load_boxes(to, barrier, term, matrix + skipped);
        } else if constexpr (COPIES) {
            if constexpr (SPLIT) elements = base + u64(skipped) * factor.rows * factor.chain * ELEMENT_BYTES;
            if constexpr (MAJOR == Major::CHAIN) {
                copy_rows(to, term, left);
            } else {
                copy_slabs(to, term, left);
            }
        }
    }

   private:
    __device__ __forceinline__ u32 source_of(u32 place) const {
        if (!GATHER) return place;
        const u32 source = factor.gather[place];
        return source < factor.sources ? source : NONE;
    }

    static __device__ __forceinline__ u32 copier() { return threadIdx.x - LEADERS; }

    // Where row `i * ROWS_AT_ONCE + ...` of the tile, this thread's, comes from.
    __device__ __forceinline__ u32 row_source(u32 i) const {
        const u32 r = i * ROWS_AT_ONCE + copier() / PIECES_OF_ROW;
        return r < rows ? source_of(row + r) : NONE;
    }

    __device__ __forceinline__ void load_boxes(u32 to, u64* barrier, u32 term, u32 z) const {
        if (PART < EXTENT && shares) {
            const u32 part = blockIdx.x % CLUSTER;
            load_part(to, part, [&](u32 at, u32 x, u32 y) {
                copy_box_to((1 << CLUSTER) - 1, at, *factor.map, barrier, x, y, z);
            }, term);
        } else {
#pragma unroll
            for (u32 part = 0; part < EXTENT / PART; part++) {
                load_part(to, part, [&](u32 at, u32 x, u32 y) {
                    copy_box(at, *factor.map, barrier, x, y, z);
                }, term);
            }
        }
    }

    // `copy(at, x, y)` for the boxes of PART rows.
    template <class Copy>
    __device__ __forceinline__ void load_part(u32 to, u32 part, Copy copy, u32 term) const {
        const u32 first = part * PART;
        if constexpr (MAJOR == Major::CHAIN) {
            copy(to + first * ROW_BYTES, term, row + first);
        } else {
#pragma unroll
            for (u32 r = 0; r < PART; r += SLAB_ROWS) {
                copy(to + (first + r) / SLAB_ROWS * SLAB_BYTES, row + first + r, term);
            }
        }
    }

    // [EXTENT][chain]: eight neighbours copy a row.
    __device__ __forceinline__ void copy_rows(u32 to, u32 term, u32 left) const {
        const u32 piece = copier() % PIECES_OF_ROW;
        const u32 bytes = bytes_of(piece * PIECE_BYTES / ELEMENT_BYTES, left);
#pragma unroll UNROLL
        for (u32 i = 0; i < TURNS; i++) {
            const u32 r = i * ROWS_AT_ONCE + copier() / PIECES_OF_ROW;
            const u32 source = KNOWN ? known[i] : row_source(i);
            const u64 place = (u64(source) * factor.chain + term) * ELEMENT_BYTES + piece * PIECE_BYTES;
            copy(to + swizzled(r * ROW_BYTES + piece * PIECE_BYTES), place, source == NONE ? 0 : bytes);
        }
    }

    // [EXTENT / 64][chain][64]: eight neighbours copy 64 rows of one term.
    __device__ __forceinline__ void copy_slabs(u32 to, u32 term, u32 left) const {
        const u32 piece = copier() % PIECES_OF_ROW;
#pragma unroll UNROLL
        for (u32 i = 0; i < TILE_CHAIN / ROWS_AT_ONCE; i++) {
            const u32 t = i * ROWS_AT_ONCE + copier() / PIECES_OF_ROW;
            const u32 link = t < left ? source_of(term + t) : NONE;
#pragma unroll(STORES ? 1 : EXTENT / SLAB_ROWS)
            for (u32 slab = 0; slab < EXTENT / SLAB_ROWS; slab++) {
                const u32 r = row + slab * SLAB_ROWS + piece * PIECE_BYTES / ELEMENT_BYTES;
                const u64 place = (u64(link) * factor.rows + r) * ELEMENT_BYTES;
                const u32 at = slab * SLAB_BYTES + swizzled(t * ROW_BYTES + piece * PIECE_BYTES);
                copy(to + at, place, link == NONE ? 0 : bytes_of(r, factor.rows));
            }
        }
    }

    // How much of a piece that starts at element `i` lies before element `end`.
    static __device__ __forceinline__ u32 bytes_of(u32 i, u32 end) {
        return i < end ? min((end - i) * ELEMENT_BYTES, PIECE_BYTES) : 0;
    }

    // A piece, of which `bytes` exist; the rest is zero.
    __device__ __forceinline__ void copy(u32 to, u64 place, u32 bytes) const {
        const u8* from = bytes > 0 ? elements + place : elements;
        if constexpr (!STORES) {
            copy_async_16(to, from, bytes);
        } else {
            u32 words[PIECE_BYTES / sizeof(u32)];
#pragma unroll
            for (u32 i = 0; i < PIECE_BYTES / sizeof(u32); i++) words[i] = word_of(from, i * sizeof(u32), bytes);
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
                         "r"(words[2]), "r"(words[3])
                         : "memory");
        }
    }

    // The four bytes from `at` on, by elements.
    static __device__ __forceinline__ u32 word_of(const u8* from, u32 at, u32 bytes) {
        u32 word = 0;
#pragma unroll
        for (u32 i = 0; i < sizeof(u32); i += ELEMENT_BYTES) {
            if (at + i < bytes) {
                const u32 code = ELEMENT_BYTES == 1 ? u32(from[at + i]) : *reinterpret_cast<const u16*>(from + at + i);
                word |= code << 8 * i;
            }
        }
        return word;
    }

    const Factor factor;
    // The group's matrix: the first plane of it, and the present one.
    const u8* base;
    const u8* elements;
    u32 row;
    u32 rows;
    u32 matrix;
    bool shares;
    u32 known[TURNS];
};

constexpr Major A_MAJOR = A_CHAIN_LAST ? Major::CHAIN : Major::ROWS;
constexpr Major B_MAJOR = B_CHAIN_LAST ? Major::CHAIN : Major::ROWS;
using LoaderA = Loader<Load{A_LOAD}, A_MAJOR, a_gather_given, TILE_ROWS, TILE_ROWS>;
using LoaderB = Loader<Load{B_LOAD}, B_MAJOR, b_gather_given, TILE_COLUMNS, PART_COLUMNS>;

// Whether threads copy of a piece of the chain of which `left` terms exist.
__device__ __forceinline__ bool copied(u32 left) { return !(LoaderA::boxes(left) && LoaderB::boxes(left)); }

// The scales of a tile's columns for the block of the chain that begins at `term`.
class ColumnScales {
   public:
    __device__ explicit ColumnScales(const Given& given) : given(given) {}

    // Bytes that TMA will bring.
    __device__ __forceinline__ u32 bytes(const Tile& tile) const {
        return SCALED && !LoaderB::STORES ? count(tile) * sizeof(float) : 0;
    }

    __device__ __forceinline__ void load(float* to, u64* barrier, const Tile& tile, u32 term) const {
        if constexpr (SCALED) {
            const float* from = given.b_scale + column_scale_place(given.scalars, tile.group, tile.column, term);
            if constexpr (LoaderB::STORES) {
                for (u32 i = threadIdx.x; i < count(tile); i += COPIERS) to[i] = from[i];
            } else if (threadIdx.x == 0) {
                copy_bulk(shared_address(to), from, bytes(tile), barrier);
            }
        }
    }

   private:
    __device__ __forceinline__ u32 count(const Tile& tile) const {
        return min(given.scalars.columns - tile.column, TILE_COLUMNS);
    }

    const Given& given;
};

// The producers.
//
// All of them wait for every stage, since who left one out could take its next turn for this one.
__device__ __forceinline__ void produce(const Given& given, Ring& ring, u32 tiles_at) {
    if (threadIdx.x >= LEADERS + COPIERS) return;
    const bool leads = threadIdx.x < LANES;
    const Scalars& p = given.scalars;
    LoaderA a({reinterpret_cast<const u8*>(given.a), given.a_gather, &given.maps[0], p.rows, p.chain, p.a_sources, 0});
    LoaderB b({reinterpret_cast<const u8*>(given.b), given.b_gather, &given.maps[1], p.columns, p.chain, p.b_sources,
               RAGGED_CHAIN ? 0 : p.groups});
    const ColumnScales scales(given);
    Present& present = present_of(ring);
    OutTiles tiles(given, present.walk);
    Place place;
    const Tile& tile = present.tile;
    for (present.index = blockIdx.x; tiles.find(present.index, present.tile); present.advance()) {
        a.begin(tile.group, tile.row, tile.rows, false);
        b.begin(tile.group, tile.column, min(p.columns - tile.column, TILE_COLUMNS), tile.shares);
        for (Chain<TILE_CHAIN> chain(tile.terms); chain.more(); chain.next()) {
            const u32 done = chain.done, left = chain.left(), stage = place.stage;
            u64* full = ring.full + stage;
            const auto load = [&] {
                const u32 to = tiles_at + stage * STAGE_BYTES;
                if (threadIdx.x == 0) {
                    barrier_expect(full, LoaderA::box_bytes(left) + LoaderB::box_bytes(left) + scales.bytes(tile));
                }
                a.load(to, full, tile.first + done, left, chain.a_plane());
                b.load(to + A_BYTES, full, tile.first + done, left, chain.b_plane());
                scales.load(ring.column_scales[SCALED ? stage : 0], full, tile, tile.first + done);
            };
            barrier_wait(ring.empty + stage, place.parity ^ 1);
            if constexpr (STREAMED) {
                load();
                if constexpr (LoaderA::STORES || LoaderB::STORES) {
                    copies_wait_all();
                    fence_async();
                    barrier_arrive(full);
                } else {
                    barrier_arrive_after_copies(full);
                }
            } else if (!copied(left)) {
                if (threadIdx.x == 0) {
                    load();
                    barrier_arrive(full);
                }
            } else if (!leads) {
                load();
                copies_wait_all();
                fence_async();
                threads_meet<COPIERS_MEET, COPIERS>();
                if (threadIdx.x == LEADERS) barrier_arrive(full);
            }
            place.advance();
        }
    }
    copies_wait_all();
}

// The ring's barriers, and the maps that TMA will use, before anything is in the ring.
__device__ __forceinline__ void open(const Given& given, Ring& ring) {
    constexpr u32 BY[] = {A_LOAD, B_LOAD, STORE};
    if (threadIdx.x == 0) {
        ring.init(STREAMED ? COPIERS : 1);
#pragma unroll
        for (u32 i = 0; i < 3; i++) {
            if (Load{BY[i]} == Load::BOXES) prefetch(given.maps[i]);
        }
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_meet();
}

// No block ends while the other one may still reach into its shared memory.
__device__ __forceinline__ void close() {
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_meet();
    }
}
