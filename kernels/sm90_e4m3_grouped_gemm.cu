// Grouped products of e4m3 factors with FP8-block scales on Hopper's tensor cores: NUMERICS.md, "Quantized operands".
//
// The frame is sm90_grouped_gemm.cuh; a stage is one block of 128 along the chain. The tensor cores make a block's part
// of 64 x 128 outputs from zero, in four steps, and it is added to the result with one fma, while the other warpgroup's
// part is made. A tile of 256 columns is two such parts a stage, from the same rows. Codes are no smaller than 2^-9, so
// that, unlike in bf16, a step of zeros alone changes nothing.
//
// Scales do not pass through the ring, but for those of columns where the groups divide the chain: a consumer's lanes
// hold them for several blocks ahead.
//
// Tensors: a_scale and b_scale as in fp8_block_scales.cuh.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static_assert(TILE_CHAIN == BLOCK && WARPGROUP == BLOCK, "a stage is a block");

constexpr u32 STEP_BYTES = 32, STEPS = ROW_BYTES / STEP_BYTES;
// Columns of a part, which share a scale unless the groups divide the chain.
constexpr u32 PART = BLOCK, PARTS = TILE_COLUMNS / PART;

// The scales of a thread's two rows for four blocks, a block in each of the four lanes that have these rows.
class RowScales {
   public:
    __device__ __forceinline__ RowScales(const Given& given, const Tile& tile, u32 first)
        : given(given), tile(tile), first(first) {
        fetch(0);
    }

    // Goes on to the terms from `done` on, a block: the next one, or the first.
    __device__ __forceinline__ void enter(u32 done) {
        if (done % AHEAD == 0) {
            held[0] = next[0];
            held[1] = next[1];
            fetch(done + AHEAD);
        }
        const u32 lane = lane_id() / HELD * HELD + done / BLOCK % HELD;
        row[0] = __shfl_sync(ALL_LANES, held[0], lane);
        row[1] = __shfl_sync(ALL_LANES, held[1], lane);
    }

    float row[2];

   private:
    static constexpr u32 HELD = 4, AHEAD = HELD * BLOCK;

    __device__ __forceinline__ void fetch(u32 done) {
        const u32 mine = done + lane_id() % HELD * BLOCK;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 row = first + row_in_warp(half);
            const u32 source = row < tile.rows && mine < tile.terms ? scaled_row(given, tile.row + row) : NONE;
            const u64 place = row_scale_place(given.scalars, source, tile.first + mine);
            next[half] = source != NONE ? given.a_scale[place] : 0.0f;
        }
    }

    const Given& given;
    const Tile& tile;
    const u32 first;
    float held[2];
    float next[2];
};

// The scales of the columns of COUNT parts in a group's own matrix, one for each part, for as many blocks as there are lanes.
template <u32 COUNT>
class MatrixScales {
   public:
    __device__ __forceinline__ MatrixScales(const Given& given, const Tile& tile) : given(given), tile(tile) {}

    __device__ __forceinline__ void enter(u32 done) {
        lane = done / BLOCK % LANES;
        if (lane > 0) return;
        const u32 mine = done + lane_id() * BLOCK;
#pragma unroll
        for (u32 part = 0; part < COUNT; part++) {
            const u64 place = column_scale_place(given.scalars, tile.group, tile.column + part * PART, mine);
            held[part] = mine < tile.terms ? given.b_scale[place] : 0.0f;
        }
    }

    __device__ __forceinline__ float column(u32 part) const { return __shfl_sync(ALL_LANES, held[part], lane); }

   private:
    const Given& given;
    const Tile& tile;
    u32 lane;
    float held[COUNT];
};

// A consumer warpgroup's state. What addresses are made of is known when this is compiled, the warpgroup's number and that
// of a stage, too: they then come from uniform registers, without an instruction of the vector units between a part and
// the next.
template <u32 WARPGROUP_NUMBER>
struct Consumer {
    static constexpr u32 FIRST = WARPGROUP_NUMBER * WARPGROUP_ROWS;

    const Given& given;
    Ring& ring;
    const u32 tiles_at;
    Outlet outlet;
    Place place;

    // The results of a tile's first COUNT parts.
    template <u32 COUNT>
    __device__ __forceinline__ void make(const Tile& tile) {
        float d[COUNT][PART / 2] = {};
        RowScales rows(given, tile, FIRST + warp_row());
        MatrixScales<COUNT> columns(given, tile);
        outlet.expect(tile, FIRST + warp_row());
        for (u32 done = 0; done < tile.terms;) {
#pragma unroll
            for (u32 stage = 0; stage < STAGES; stage++) {
                if (stage != place.stage || done >= tile.terms) continue;
                barrier_wait(ring.full + stage, place.parity);
                if (copied(tile.terms - done)) fence_async();
                multiply<COUNT>(stage, done, rows, columns, d);
                done += TILE_CHAIN;
                place.advance();
            }
        }
#pragma unroll
        for (u32 n = 0; n < COUNT; n++) outlet.put(tile, FIRST + warp_row(), d[n], n * PART);
    }

    // A tile of which there is nothing to make here.
    __device__ __forceinline__ void skip(const Tile& tile) { ring.skip(place, tile.terms); }

   private:
    template <u32 COUNT>
    __device__ __forceinline__ void multiply(u32 stage, u32 done, RowScales& rows, MatrixScales<COUNT>& columns,
                                             float (&d)[COUNT][PART / 2]) const {
        const u64 tiles = descriptor(tiles_at);
        float part[PART / 2];
#pragma unroll
        for (u32 n = 0; n < COUNT; n++) {
            wgmma_begin(part);
#pragma unroll
            for (u32 i = 0; i < STEPS; i++) {
                const u32 at = stage * STAGE_BYTES + i * STEP_BYTES;
                const u64 left = advanced(tiles, at + FIRST * ROW_BYTES), right = advanced(tiles, at + A_BYTES + n * PART * ROW_BYTES);
                Wgmma<PART>::e4m3_shared(part, left, right, i > 0);
            }
            wgmma_commit();
            if (n == 0) rows.enter(done);
            if constexpr (RAGGED_CHAIN) {
                wgmma_wait<0>(part);
                add(part, rows.row, ring.column_scales[stage] + n * PART, d[n]);
                if (n + 1 == COUNT) ring.leave(stage);
            } else {
                if (n == 0) columns.enter(done);
                const float column = columns.column(n), scale[2] = {rows.row[0] * column, rows.row[1] * column};
                wgmma_wait<0>(part);
                if (n + 1 == COUNT) ring.leave(stage);
                add(part, scale, d[n]);
            }
        }
    }

    // sum = fma(part, scale of the row, sum)
    static __device__ __forceinline__ void add(const float (&part)[PART / 2], const float (&scale)[2],
                                               float (&sum)[PART / 2]) {
#pragma unroll
        for (u32 i = 0; i < PART / 2; i++) sum[i] = __fmaf_rn(part[i], scale[i / 2 % 2], sum[i]);
    }

    // The same with a scale for each row and one for each column.
    static __device__ __forceinline__ void add(const float (&part)[PART / 2], const float (&row)[2],
                                               const float* columns, float (&sum)[PART / 2]) {
#pragma unroll
        for (u32 i = 0; i < PART / 2; i += 4) {
            const float2 column = *reinterpret_cast<const float2*>(columns + column_of(i / 4));
            sum[i] = __fmaf_rn(part[i], row[0] * column.x, sum[i]);
            sum[i + 1] = __fmaf_rn(part[i + 1], row[0] * column.y, sum[i + 1]);
            sum[i + 2] = __fmaf_rn(part[i + 2], row[1] * column.x, sum[i + 2]);
            sum[i + 3] = __fmaf_rn(part[i + 3], row[1] * column.y, sum[i + 3]);
        }
    }
};

template <u32 WARPGROUP_NUMBER>
__device__ __forceinline__ void consume(const Given& given, Ring& ring, u32 tiles_at) {
    // Its results leave a warp no registers for what it knows.
    Present& present = present_of(ring);
    OutTiles tiles(given, present.walk);
    Consumer<WARPGROUP_NUMBER> consumer{given, ring, tiles_at, Outlet(given, tiles_at), Place()};
    const Tile& tile = present.tile;
    present.index = blockIdx.x;
    while (tiles.find(present.index, present.tile)) {
        const bool kept = ACCUMULATE && tile.terms == 0;
        if (kept || consumer.FIRST >= tile.rows) {
            consumer.skip(tile);
        } else if (PARTS > 1 && given.scalars.columns - tile.column <= PART) {
            consumer.template make<1>(tile);
        } else {
            consumer.template make<PARTS>(tile);
        }
        present.advance();
    }
    consumer.outlet.close();
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 1)
    sm90_e4m3_grouped_gemm(const __grid_constant__ Given given) {
    begin(given);
    __shared__ Ring ring;
    const u32 tiles_at = ring_base();
    open(given, ring);
    if (threadIdx.x < WARPGROUP) {
        registers_give<PRODUCER_REGISTERS>();
        produce(given, ring, tiles_at);
    } else {
        registers_take<CONSUMER_REGISTERS>();
        if (threadIdx.x < 2 * WARPGROUP) {
            consume<0>(given, ring, tiles_at);
        } else {
            consume<1>(given, ring, tiles_at);
        }
    }
    close();
}

#else

// Other chips compute the model F32.
extern "C" __global__ void __launch_bounds__(SIMT_THREADS<64>, 2)
    sm90_e4m3_grouped_gemm(const __grid_constant__ Given given) {
    begin(given);
    simt_grouped_gemm<64>(given);
}

#endif
