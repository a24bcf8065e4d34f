// Grouped products of bf16 factors on Hopper's tensor cores: NUMERICS.md, "Hopper" and "The three products of a layer".
//
// The frame is sm90_grouped_gemm.cuh. A step of the model is one `wgmma`; as many steps run as the chain has, since a
// step of zeros alone would make +0 of -0.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr u32 STEP = 16, STEPS = TILE_CHAIN / STEP;

// From one step of an operand to the next.
__device__ constexpr u32 step_bytes(Major major) { return STEP * (major == Major::CHAIN ? ELEMENT_BYTES : ROW_BYTES); }

// The products of a tile's chain for the 64 rows from `first` on. The last of them are under way at the end.
__device__ __forceinline__ void multiply(Ring& ring, Place& place, u32 tiles_at, u32 first, u32 terms,
                                         float (&d)[TILE_COLUMNS / 2]) {
    for (u32 done = 0; done < terms; done += TILE_CHAIN) {
        const u32 left = terms - done, steps = ceil_div(min(left, TILE_CHAIN), STEP);
        barrier_wait(ring.full + place.stage, place.parity);
        if (copied(left)) fence_async();
        const u32 at = tiles_at + place.stage * STAGE_BYTES;
        const u64 a = descriptor(at + first * ROW_BYTES, SLAB_BYTES);
        const u64 b = descriptor(at + A_BYTES, SLAB_BYTES);
        const auto step = [&](u32 i) {
            Wgmma<TILE_COLUMNS>::bf16_shared<A_MAJOR, B_MAJOR>(d, advanced(a, i * step_bytes(A_MAJOR)),
                                                              advanced(b, i * step_bytes(B_MAJOR)), true);
        };
        if (steps == STEPS) {
            wgmma_begin(d);
#pragma unroll
            for (u32 i = 0; i < STEPS; i++) step(i);
            wgmma_commit();
        } else {
#pragma unroll 1
            for (u32 i = 0; i < steps; i++) {
                wgmma_begin(d);
                step(i);
                wgmma_commit();
            }
        }
        // One group stays under way, so that the tensor cores do not wait for this warpgroup.
        wgmma_wait<1>(d);
        if (done > 0) ring.leave(place.before());
        place.advance();
    }
}

__device__ __forceinline__ void consume(const Given& given, Ring& ring, u32 tiles_at) {
    const u32 first = first_row();
    OutTiles tiles(given);
    Outlet outlet(given, tiles_at);
    Place place;
    Tile tile, next;
    u64 index = blockIdx.x;
    float d[TILE_COLUMNS / 2];
    for (bool more = tiles.find(index, tile); more; tile = next) {
        index += gridDim.x;
        const bool kept = ACCUMULATE && tile.terms == 0;
        if (kept || first >= tile.rows) {
            ring.skip(place, tile.terms);
            more = tiles.find(index, next);
            continue;
        }
#pragma unroll
        for (u32 i = 0; i < TILE_COLUMNS / 2; i++) d[i] = 0.0f;
        multiply(ring, place, tiles_at, first, tile.terms, d);
        // The tensor cores need not wait for this, either.
        more = tiles.find(index, next);
        wgmma_wait<0>(d);
        if (tile.terms > 0) ring.leave(place.before());
        outlet.put(tile, first + warp_row(), d);
    }
    outlet.close();
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 1)
    sm90_bf16_grouped_gemm(const __grid_constant__ Given given) {
    begin(given);
    __shared__ Ring ring;
    const u32 tiles_at = ring_base();
    open(given, ring);
    if (threadIdx.x < WARPGROUP) {
        registers_give<PRODUCER_REGISTERS>();
        produce<false>(given, ring, tiles_at, [](u32, const Tile&, u32) {});
    } else {
        registers_take<CONSUMER_REGISTERS>();
        consume(given, ring, tiles_at);
    }
    close();
}

#else

// Other chips compute the model F32.
extern "C" __global__ void __launch_bounds__(SIMT_THREADS<64>, 2)
    sm90_bf16_grouped_gemm(const __grid_constant__ Given given) {
    begin(given);
    simt_grouped_gemm<64>(given);
}

#endif
