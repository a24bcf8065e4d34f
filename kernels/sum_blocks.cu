// The end of a token sum: the sums of a group's blocks in order, +0 without any. NUMERICS.md, "Sums". A thread has a
// column of a group.

extern "C" __global__ void __launch_bounds__(128) sum_blocks(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u64 i = thread_index();
    if (i >= u64(p.groups) * p.columns) {
        return;
    }
    const float* sum = given.sums + i / p.columns * p.group_blocks * p.columns + i % p.columns;
    float total = p.group_blocks > 0 ? *sum : 0.0f;
    const auto load_sum = [&](u64 block) { return sum[block * p.columns]; };
    in_groups<8>(1, p.group_blocks, 1, load_sum, [&](u64, float next) { total += next; });
    given.out[i] = p.accumulate != 0 ? given.out[i] + total : total;
}
