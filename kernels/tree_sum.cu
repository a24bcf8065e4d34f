// The sum of the parts along the tree over their index: NUMERICS.md, "Sums". A thread has a run.
//
// Dynamic shared memory: the stack, then the plan of parts + 1 words.

extern __shared__ float4 shared[];

extern "C" __global__ void __launch_bounds__(128) tree_sum(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    u32* plan = reinterpret_cast<u32*>(shared + p.levels * 2 * blockDim.x);
    for (u32 part = 1 + threadIdx.x; part < p.parts; part += blockDim.x) {
        plan[part] = parting(0, p.parts, part - 1, part);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        plan_tree(plan, p.parts);
    }
    __syncthreads();
    const u64 elements = u64(p.rows) * p.columns, i = thread_index() * RUN;
    if (i >= elements) {
        return;
    }
    if (vectors(elements, given.parts, given.out)) {
        const auto part = [&](u32 n) { return load_run<true>(given.parts, n * elements + i, RUN); };
        store_run<true>(given.out, i, RUN, sum_tree(plan, p.parts, shared, part));
    } else {
        const u32 length = run_length<false>(i, elements);
        const auto part = [&](u32 n) { return load_run<false>(given.parts, n * elements + i, length); };
        store_run<false>(given.out, i, length, sum_tree(plan, p.parts, shared, part));
    }
}
