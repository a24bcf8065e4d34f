// Where ragged groups end, whatever their offsets hold: NUMERICS.md, "Indices from the device".

// The end of group first + lane, of which group `first` begins at `begin`; past the last group, of that. `rows`: all rows;
// ends are multiples of `block`, a power of two. By a warp.
__device__ __forceinline__ u32 group_end(const u32* offsets, u32 groups, u32 rows, u32 block, u32 first, u32 begin) {
    const u32 offset = offsets[min(first + lane_id(), groups - 1) + 1];
    u32 end = max(begin, min(offset, min(offsets[groups], rows)) & ~(block - 1));
#pragma unroll
    for (u32 by = 1; by < LANES; by *= 2) {
        const u32 before = __shfl_up_sync(ALL_LANES, end, by);
        if (lane_id() >= by) end = max(end, before);
    }
    return end;
}

// The beginning of the same group.
__device__ __forceinline__ u32 group_begin(u32 end, u32 begin) {
    const u32 before = __shfl_up_sync(ALL_LANES, end, 1);
    return lane_id() == 0 ? begin : before;
}
