// Grouped products of bf16 factors on Hopper's tensor cores: NUMERICS.md, "Hopper" and "The three products of a layer".
//
// The frame is sm90_grouped_gemm.cuh. A step of the model is one `wgmma`; as many steps run as the chain has, since a
// step of zeros alone would make +0 of -0. Of split factors each part is made from zero, and added to the result.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr u32 STEP = 16, STEPS = TILE_CHAIN / STEP;

// From one step of an operand to the next.
__device__ constexpr u32 step_bytes(Major major) { return STEP * (major == Major::CHAIN ? ELEMENT_BYTES : ROW_BYTES); }

// A tile with no more columns than this takes instructions of as many.
constexpr u32 FEW_COLUMNS = 128;

// A consumer warpgroup's state.
struct Consumer {
    const Given& given;
    Ring& ring;
    const u32 tiles_at;
    // The warpgroup's first row of a tile.
    const u32 first;
    Outlet outlet;
    Place place;

    // The results of a tile's first COLUMNS columns. `meanwhile` runs beside the last products.
    template <u32 COLUMNS, class Meanwhile>
    __device__ __forceinline__ void make(const Tile& tile, Meanwhile meanwhile) {
        float d[COLUMNS / 2];
        clear<COLUMNS>(d);
        for (u32 done = 0; done < tile.terms; done += TILE_CHAIN) {
            const u32 left = tile.terms - done;
            barrier_wait(ring.full + place.stage, place.parity);
            if (copied(left)) fence_async();
            multiply<COLUMNS>(min(left, TILE_CHAIN), d);
            // One group stays under way, so that the tensor cores do not wait for this warpgroup.
            wgmma_wait<1>(d);
            if (done > 0) ring.leave(place.before());
            place.advance();
        }
        meanwhile();
        wgmma_wait<0>(d);
        if (tile.terms > 0) ring.leave(place.before());
        // Without a term nothing is added, not even zero.
        if (tile.terms > 0 || !ACCUMULATE) outlet.put(tile, first + warp_row(), d);
    }

    // The same with split factors.
    template <u32 COLUMNS>
    __device__ __forceinline__ void make_split(const Tile& tile) {
        float d[COLUMNS / 2], part[COLUMNS / 2];
        clear<COLUMNS>(d);
        for (Chain<TILE_CHAIN> chain(tile.terms); chain.more(); chain.next()) {
            if (chain.begins()) clear<COLUMNS>(part);
            barrier_wait(ring.full + place.stage, place.parity);
            if (copied(chain.left())) fence_async();
            multiply<COLUMNS>(min(chain.left(), TILE_CHAIN), part);
            wgmma_wait<0>(part);
            ring.leave(place.stage);
            place.advance();
            if (chain.ends()) {
#pragma unroll
                for (u32 i = 0; i < COLUMNS / 2; i++) d[i] += part[i];
            }
        }
        if (tile.terms > 0 || !ACCUMULATE) outlet.put(tile, first + warp_row(), d);
    }

   private:
    template <u32 COLUMNS>
    static __device__ __forceinline__ void clear(float (&d)[COLUMNS / 2]) {
#pragma unroll
        for (u32 i = 0; i < COLUMNS / 2; i++) d[i] = 0.0f;
    }

    // The products of a stage that holds so many terms of the chain.
    template <u32 COLUMNS>
    __device__ __forceinline__ void multiply(u32 terms, float (&d)[COLUMNS / 2]) const {
        const u32 at = tiles_at + place.stage * STAGE_BYTES, steps = ceil_div(terms, STEP);
        const u64 a = descriptor(at + first * ROW_BYTES, SLAB_BYTES);
        const u64 b = descriptor(at + A_BYTES, SLAB_BYTES);
        const auto step = [&](u32 i) {
            Wgmma<COLUMNS>::template bf16_shared<A_MAJOR, B_MAJOR>(d, advanced(a, i * step_bytes(A_MAJOR)),
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
    }
};

__device__ __forceinline__ void consume(const Given& given, Ring& ring, u32 tiles_at) {
    Walk walk;
    OutTiles tiles(given, walk);
    Consumer consumer{given, ring, tiles_at, first_row(), Outlet(given, tiles_at), Place()};
    Tile tile, next;
    u64 index = blockIdx.x;
    bool more = tiles.find(index, tile);
    const auto find_next = [&] { more = tiles.find(index += gridDim.x, next); };
    for (; more; tile = next) {
        if (consumer.first >= tile.rows) {
            ring.skip(consumer.place, tile.terms);
            find_next();
        } else if constexpr (SPLIT) {
            consumer.make_split<TILE_COLUMNS>(tile);
            find_next();
        } else if (TILE_COLUMNS > FEW_COLUMNS && given.scalars.columns - tile.column <= FEW_COLUMNS) {
            consumer.make<FEW_COLUMNS>(tile, find_next);
        } else {
            consumer.make<TILE_COLUMNS>(tile, find_next);
        }
    }
    consumer.outlet.close();
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 1)
    sm90_bf16_grouped_gemm(const __grid_constant__ Given given) {
    begin(given);
    __shared__ Ring ring;
    const u32 tiles_at = ring_base();
    open(given, ring);
    if (threadIdx.x < WARPGROUP) {
        registers_give<PRODUCER_REGISTERS>();
        produce(given, ring, tiles_at);
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
