// The groups' offsets as they count, and when each group is padded to whole blocks. A warp has the groups, 32 at a time.

extern "C" __global__ void __launch_bounds__(LANES) group_quantize_offsets(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    u32 counted = 0, padded = 0;
    for (u32 first = 0; first < p.groups; first += LANES) {
        const u32 group = first + lane_id();
        const u32 end = group_end(given.offsets, p.groups, p.rows, 1, first, counted), begin = group_begin(end, counted);
        const u32 own = (end - begin + p.block - 1) / p.block * p.block, through = warp_scan(own);
        if (group < p.groups) {
            given.counted[group] = begin;
            given.padded[group] = padded + through - own;
        }
        counted = __shfl_sync(ALL_LANES, end, LANES - 1);
        padded += __shfl_sync(ALL_LANES, through, LANES - 1);
    }
    if (threadIdx.x == 0) {
        given.counted[p.groups] = counted;
        given.padded[p.groups] = padded;
    }
}
