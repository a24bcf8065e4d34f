// The first key that any row of each block of rows sees; the largest number for a block of which no row sees any.
// NUMERICS.md, "Attention". A warp has a block of BLOCK rows of a sequence.
//
// start [batch * sequence], first [batch, blocks].

extern "C" __global__ void __launch_bounds__(WARPS * LANES) attention_first(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 i = blockIdx.x * WARPS + threadIdx.x / LANES, lane = lane_id();
    if (i >= p.batch * p.blocks) return;
    const u64 token = static_cast<u64>(i / p.blocks) * p.sequence;
    u32 first = NONE;
    for (u32 row = i % p.blocks * BLOCK + lane; row < min(p.sequence, (i % p.blocks + 1) * BLOCK); row += LANES) {
        first = min(first, given.start[token + row]);
    }
    first = __reduce_min_sync(ALL_LANES, first);
    if (lane == 0) given.first[i] = first;
}
