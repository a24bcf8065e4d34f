// Sums of integers over the lanes of a warp and over what the lanes take in turns.

// The sum of the values of this lane and the lanes before it.
__device__ __forceinline__ u32 warp_scan(u32 value) {
    const u32 lane = lane_id();
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 before = __shfl_up_sync(ALL_LANES, value, distance);
        value += lane < distance ? 0 : before;
    }
    return value;
}

// Gives `store(i, sum of value(0) .. value(i - 1))` for each i, and returns the sum of all `count` values. By a warp.
template <typename Value, typename Store>
__device__ __forceinline__ u32 warp_exclusive_scan(u32 count, Value value, Store store) {
    u32 total = 0;
    for (u32 first = 0; first < count; first += 32) {
        const u32 i = first + lane_id();
        const u32 own = i < count ? value(i) : 0;
        const u32 sum = warp_scan(own);
        if (i < count) {
            store(i, total + sum - own);
        }
        total += __shfl_sync(ALL_LANES, sum, 31);
    }
    return total;
}
