// The results of a grouped product on their way from a consumer warp's registers to memory.
//
// A warp has 16 rows of a tile. They go 128 bytes at a time (64 bf16, 32 f32) through a slot of shared memory, in which
// they lie swizzled as in sm90.cuh. Each warp has two slots of its own, so that no warp waits for another, and reads of
// one go on while the other is written. How results leave a slot is the constant STORE:
//
//   BOXES     TMA, where all 16 rows belong to the group; else as PIECES.
//   PIECES    16 bytes by every lane, of whole rows of 128 bytes.
//   ELEMENTS  there is no slot: element by element from the registers, for rows that are not aligned.
//
// Constants: RAGGED_CHAIN, ACCUMULATE (not with BOXES), STORE. Scalars: rows, columns. Tensor: out. Map: 2.

constexpr Load OUT_STORE{STORE};
constexpr u32 OUT_ROWS = 16, OUT_SLOTS = 2, OUT_SLOT_BYTES = OUT_ROWS * ROW_BYTES;
constexpr u32 OUT_ELEMENT_BYTES = sizeof(*Given::out), OUT_COLUMNS = ROW_BYTES / OUT_ELEMENT_BYTES;

static_assert(OUT_STORE != Load::BOXES || !ACCUMULATE, "TMA adds otherwise than NUMERICS.md");

// The warp's first row, of its warpgroup's.
__device__ __forceinline__ u32 warp_row() { return threadIdx.x % WARPGROUP / LANES * OUT_ROWS; }

// The row of accumulators d[4 i + 2 half + j], of the 16 of their warp.
__device__ __forceinline__ u32 row_in_warp(u32 half) { return half * 8 + lane_id() / 4; }

// The columns of d[4 i + 2 half] and its neighbour, of the tile's.
__device__ __forceinline__ u32 column_of(u32 i) { return i * 8 + lane_id() % 4 * 2; }

__device__ __forceinline__ void store_shared_2(u32 to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

// Four matrices of 8 x 8 bf16, of which a lane has two neighbours each: columns `lane % 4 * 2` and the next of row
// `lane / 4`. Lane 8 m + r says where row r of matrix m goes, 16 bytes.
__device__ __forceinline__ void store_shared_matrices(u32 to, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

__device__ __forceinline__ float4 load_shared_16(u32 from) {
    float4 piece;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(piece.x), "=f"(piece.y), "=f"(piece.z), "=f"(piece.w)
                 : "r"(from)
                 : "memory");
    return piece;
}

// A warp's way out.
class Outlet {
    // Lanes go through the pieces of a slot, eight neighbours to a row.
    static constexpr u32 TURNS = OUT_ROWS * PIECES_OF_ROW / LANES;

   public:
    __device__ explicit Outlet(const Given& given, u32 tiles_at) : given(given), tiles_at(tiles_at) {}

    // Long before `put`: what results are added to is brought to the L2 cache.
    __device__ __forceinline__ void expect(const Tile& tile, u32 first) const {
        if constexpr (ACCUMULATE && OUT_STORE == Load::PIECES) {
            constexpr u32 LINE = 128 / OUT_ELEMENT_BYTES, LINES = TILE_COLUMNS / LINE;
#pragma unroll
            for (u32 i = lane_id(); i < OUT_ROWS * LINES; i += LANES) {
                const u32 row = first + i / LINES, column = tile.column + i % LINES * LINE;
                if (row < tile.rows && column < given.scalars.columns) {
                    prefetch_line(given.out + out_place(given.scalars, tile.group, tile.row + row, column));
                }
            }
        }
    }

    // The warp's rows, from `first` of the tile on, for 2 COUNT of its columns, from the one after `left` others on.
    template <u32 COUNT>
    __device__ __forceinline__ void put(const Tile& tile, u32 first, const float (&d)[COUNT], u32 left = 0) {
        if (first >= tile.rows) return;
        tile_column = tile.column + left;
        if constexpr (OUT_STORE == Load::ELEMENTS) {
            put_elements(tile, first, d);
        } else {
            put_slots(tile, first, d);
        }
    }

    // Before the block ends.
    __device__ __forceinline__ void close() const { stores_wait<0>(); }

   private:
    // The warp's own.
    __device__ __forceinline__ u32 slots() const {
        const u32 warp = threadIdx.x / LANES - WARPGROUP / LANES;
        return tiles_at + STAGES * STAGE_BYTES + warp * OUT_SLOTS * OUT_SLOT_BYTES;
    }

    template <u32 COUNT>
    __device__ __forceinline__ void put_slots(const Tile& tile, u32 first, const float (&d)[COUNT]) {
        constexpr u32 SLOTS = 2 * COUNT / OUT_COLUMNS;
        // TMA ends a matrix of a group's own, but not rows among others.
        const bool box = OUT_STORE == Load::BOXES && (RAGGED_CHAIN || first + OUT_ROWS <= tile.rows);
        // What results are added to is asked for one slot ahead.
        float4 before[2][TURNS];
        if constexpr (ACCUMULATE) fetch(tile, first, 0, before[0]);
#pragma unroll
        for (u32 i = 0; i < SLOTS; i++) {
            if (tile_column + i * OUT_COLUMNS >= given.scalars.columns) break;
            if constexpr (ACCUMULATE) {
                if (i + 1 < SLOTS) fetch(tile, first, i + 1, before[(i + 1) % 2]);
            }
            const u32 slot = slots() + turn * OUT_SLOT_BYTES;
            turn = (turn + 1) % OUT_SLOTS;
            stores_wait<OUT_SLOTS - 1>();
            __syncwarp();
            fill(slot, i, d);
            if (box) {
                fence_async();
                __syncwarp();
                if (lane_id() == 0) {
                    store_box(given.maps[2], slot, tile_column + i * OUT_COLUMNS, tile.row + first,
                              RAGGED_CHAIN ? tile.group : 0);
                }
            } else {
                __syncwarp();
                put_pieces(slot, tile, first, i, before[i % 2]);
            }
            stores_commit();
        }
    }

    // Accumulators of the tile's slot `i`.
    template <u32 COUNT>
    __device__ __forceinline__ void fill(u32 slot, u32 i, const float (&d)[COUNT]) const {
        constexpr u32 ACROSS = OUT_COLUMNS / 8;
        if constexpr (OUT_ELEMENT_BYTES == sizeof(bf16)) {
            const u32 at = lane_id() % OUT_ROWS * ROW_BYTES + lane_id() / OUT_ROWS * PIECE_BYTES;
#pragma unroll
            for (u32 j = 0; j < ACROSS; j += 2) {
                const float* from = d + 4 * (i * ACROSS + j);
                store_shared_matrices(slot + swizzled(at + j * PIECE_BYTES), bf16_pair(from[0], from[1]),
                                      bf16_pair(from[2], from[3]), bf16_pair(from[4], from[5]),
                                      bf16_pair(from[6], from[7]));
            }
        } else {
#pragma unroll
            for (u32 j = 0; j < ACROSS; j++) {
                const float* from = d + 4 * (i * ACROSS + j);
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    const u32 at = row_in_warp(half) * ROW_BYTES + column_of(j) * OUT_ELEMENT_BYTES;
                    store_shared_2(slot + swizzled(at), from[2 * half], from[2 * half + 1]);
                }
            }
        }
    }

    __device__ __forceinline__ void put_pieces(u32 slot, const Tile& tile, u32 first, u32 i,
                                               const float4 (&before)[TURNS]) const {
#pragma unroll
        for (u32 j = 0; j < TURNS; j++) {
            float4 piece = load_shared_16(slot + swizzled((j * LANES + lane_id()) * PIECE_BYTES));
            if constexpr (ACCUMULATE) {
                const float4 x = before[j];
                piece = make_float4(x.x + piece.x, x.y + piece.y, x.z + piece.z, x.w + piece.w);
            }
            if (float4* to = out_piece(tile, first, i, j)) *to = piece;
        }
    }

    __device__ __forceinline__ void fetch(const Tile& tile, u32 first, u32 i, float4 (&before)[TURNS]) const {
#pragma unroll
        for (u32 j = 0; j < TURNS; j++) {
            const float4* from = out_piece(tile, first, i, j);
            before[j] = from != nullptr ? *from : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

    // Where the piece number `j` of this lane lies in memory, if it does.
    __device__ __forceinline__ float4* out_piece(const Tile& tile, u32 first, u32 i, u32 j) const {
        const Scalars& p = given.scalars;
        const u32 piece = j * LANES + lane_id();
        const u32 row = first + piece / PIECES_OF_ROW;
        const u32 column =
            tile_column + i * OUT_COLUMNS + piece % PIECES_OF_ROW * (PIECE_BYTES / OUT_ELEMENT_BYTES);
        if (row >= tile.rows || column >= p.columns) return nullptr;
        return reinterpret_cast<float4*>(given.out + out_place(p, tile.group, tile.row + row, column));
    }

    template <u32 COUNT>
    __device__ __forceinline__ void put_elements(const Tile& tile, u32 first, const float (&d)[COUNT]) const {
        const Scalars& p = given.scalars;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 r = first + row_in_warp(half);
            if (r >= tile.rows) continue;
            const u64 row = out_place(p, tile.group, tile.row + r, 0);
#pragma unroll
            for (u32 i = 0; i < COUNT / 4; i++) {
                const u32 c = tile_column + column_of(i);
                if (c < p.columns) ::put(given.out, row + c, d[4 * i + 2 * half]);
                if (c + 1 < p.columns) ::put(given.out, row + c + 1, d[4 * i + 2 * half + 1]);
            }
        }
    }

    const Given& given;
    const u32 tiles_at;
    // The first column of what goes out.
    u32 tile_column;
    u32 turn = 0;
};
