// The end of a token sum: the sums of a group's blocks in order, +0 without any. NUMERICS.md, "Sums". A thread has a column
// of a group.

extern "C" __global__ void __launch_bounds__(128) sum_blocks(const __grid_constant__ Given given) {
    begin(given);
    const Params& p = given.params;
    const u64 i = thread_index();
    if (i >= u64(p.groups) * p.columns) {
        return;
    }
    const float* sum = given.sums + i / p.columns * p.group_blocks * p.columns + i % p.columns;
    float total = p.group_blocks > 0 ? *sum : 0.0f;
#pragma unroll 8
    for (u32 block = 1; block < p.group_blocks; ++block) {
        total += sum[u64(block) * p.columns];
    }
    given.out[i] = p.accumulate != 0 ? given.out[i] + total : total;
}
