// Grouped products of e4m3 factors with FP8-block scales on Hopper's tensor cores: NUMERICS.md, "Quantized operands".
//
// The frame is sm90_grouped_gemm.cuh; a stage is one block of 128 along the chain, with the scales of its rows and
// columns beside it. The tensor cores make a block's part from zero, in four steps, and it is added to the result with
// one fma. Codes are no smaller than 2^-9, so that, unlike in bf16, a step of zeros alone changes nothing.
//
// Tensors: a_scale and b_scale as in fp8_block_scales.cuh.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static_assert(TILE_CHAIN == BLOCK && TILE_COLUMNS == BLOCK && WARPGROUP == BLOCK, "a stage is a block");

constexpr u32 STEP_BYTES = 32, STEPS = ROW_BYTES / STEP_BYTES;
// The columns of a tile share a scale, unless the groups divide the chain.
constexpr u32 COLUMN_SCALES = RAGGED_CHAIN ? TILE_COLUMNS : 1;

struct Scales {
    float row[STAGES][TILE_ROWS];
    float column[STAGES][COLUMN_SCALES];

    // By the threads of a warpgroup.
    __device__ __forceinline__ void load(const Given& given, u32 stage, const Tile& tile, u32 term) {
        const Scalars& p = given.scalars;
        const u32 i = threadIdx.x;
        if (i < tile.rows) {
            const u64 place = row_scale_place(p, tile.row + i, term);
            copy_async_4(shared_address(&row[stage][i]), given.a_scale + place);
        }
        if (i < min(COLUMN_SCALES, p.columns - tile.column)) {
            const u64 place = column_scale_place(p, tile.group, tile.column + i, term);
            copy_async_4(shared_address(&column[stage][i]), given.b_scale + place);
        }
    }
};

// The sum of a tile's blocks for the 64 rows from `first` on.
__device__ __forceinline__ void multiply(Ring& ring, Place& place, const Scales& scales, u32 tiles_at, u32 first,
                                         u32 terms, float (&d)[TILE_COLUMNS / 2]) {
    const u32 row = first + warp_row();
    float part[TILE_COLUMNS / 2];
    for (u32 done = 0; done < terms; done += TILE_CHAIN) {
        const u32 stage = place.stage;
        barrier_wait(ring.full + stage, place.parity);
        if (copied(terms - done)) fence_async();
        const u32 at = tiles_at + stage * STAGE_BYTES;
        const u64 a = descriptor(at + first * ROW_BYTES), b = descriptor(at + A_BYTES);
        wgmma_begin(part);
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) {
            Wgmma<TILE_COLUMNS>::e4m3_shared(part, advanced(a, i * STEP_BYTES), advanced(b, i * STEP_BYTES), i > 0);
        }
        wgmma_commit();
        const float rows[2] = {scales.row[stage][row + row_in_warp(0)], scales.row[stage][row + row_in_warp(1)]};
        wgmma_wait<0>(part);
#pragma unroll
        for (u32 i = 0; i < TILE_COLUMNS / 2; i++) {
            const u32 column = RAGGED_CHAIN ? column_of(i / 4) + i % 2 : 0;
            d[i] = __fmaf_rn(part[i], rows[i / 2 % 2] * scales.column[stage][column], d[i]);
        }
        ring.leave(stage);
        place.advance();
    }
}

__device__ __forceinline__ void consume(const Given& given, Ring& ring, const Scales& scales, u32 tiles_at) {
    const u32 first = first_row();
    OutTiles tiles(given);
    Outlet outlet(given, tiles_at);
    Place place;
    Tile tile;
    float d[TILE_COLUMNS / 2];
    for (u64 index = blockIdx.x; tiles.find(index, tile); index += gridDim.x) {
        const bool kept = ACCUMULATE && tile.terms == 0;
        if (kept || first >= tile.rows) {
            ring.skip(place, tile.terms);
            continue;
        }
#pragma unroll
        for (u32 i = 0; i < TILE_COLUMNS / 2; i++) d[i] = 0.0f;
        multiply(ring, place, scales, tiles_at, first, tile.terms, d);
        outlet.put(tile, first + warp_row(), d);
    }
    outlet.close();
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 1)
    sm90_e4m3_grouped_gemm(const __grid_constant__ Given given) {
    begin(given);
    __shared__ Ring ring;
    __shared__ Scales scales;
    const u32 tiles_at = ring_base();
    open(given, ring);
    if (threadIdx.x < WARPGROUP) {
        registers_give<PRODUCER_REGISTERS>();
        produce(given, ring, tiles_at, [&](u32 stage, const Tile& tile, u32 term) {
            scales.load(given, stage, tile, term);
        });
    } else {
        registers_take<CONSUMER_REGISTERS>();
        consume(given, ring, scales, tiles_at);
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
