// The groups' offsets when each is padded to whole blocks. A warp scans the groups.

extern "C" __global__ void __launch_bounds__(32) group_quantize_offsets(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const auto padded = [&](u32 g) { return (given.offsets[g + 1] - given.offsets[g] + p.block - 1) / p.block * p.block; };
    const u32 total = warp_exclusive_scan(p.groups, padded, [&](u32 g, u32 offset) { given.padded[g] = offset; });
    if (threadIdx.x == 0) {
        given.padded[p.groups] = total;
    }
}
