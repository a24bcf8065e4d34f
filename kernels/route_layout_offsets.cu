// The groups' offsets from their sizes, none beyond the slots. A warp scans the experts.

extern "C" __global__ void __launch_bounds__(LANES) route_layout_offsets(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 total = warp_exclusive_scan(
        p.experts, [&](u32 e) { return given.totals[e]; }, [&](u32 e, u32 offset) { given.offsets[e] = min(offset, p.slots); });
    if (threadIdx.x == 0) {
        given.offsets[p.experts] = min(total, p.slots);
    }
}
