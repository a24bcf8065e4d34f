// What the thread blocks before counted, row by row of a table, in place; and the totals of the rows. A warp has a row.

constexpr u32 WARPS = 4;

extern "C" __global__ void __launch_bounds__(WARPS * LANES) route_scan(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u64 row = u64(blockIdx.x) * WARPS + threadIdx.x / LANES;
    if (row >= p.rows) {
        return;
    }
    u32* counts = given.table + row * p.columns;
    const u32 total = warp_exclusive_scan(
        p.columns, [&](u32 i) { return counts[i]; }, [&](u32 i, u32 before) { counts[i] = before; });
    if (lane_id() == 0) {
        given.totals[row] = total;
    }
}
