// The queries of latent attention: the rotary columns of each head rotated in neighbouring pairs (or back), the others
// copied. A thread has a run of one of the two parts.

template <bool VECTOR>
__device__ __forceinline__ void query_run(const Given& given, u64 head, u32 run) {
    const Scalars& p = given.scalars;
    const u32 copied = runs_of(p.nope);
    const u64 base = head * (p.nope + p.rope);
    if (run < copied) {
        const u32 start = run * RUN;
        copy_run<VECTOR>(given.out, base + start, given.x, base + start, run_length<VECTOR>(start, p.nope));
        return;
    }
    const u32 start = (run - copied) * RUN, n = run_length<VECTOR>(start, p.rope);
    const u64 at = base + p.nope + start;
    Run x = load_run<VECTOR>(given.x, at, n);
    const u32 position = given.positions[head / p.heads];
    rotate_run(x, n, angles_of(given.cos, given.sin, position, p.table_rows, p.rope / 2), start / 2, p.inverse != 0);
    store_run<VECTOR>(given.out, at, n, x);
}

extern "C" __global__ void __launch_bounds__(128) mla_query(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 runs = runs_of(p.nope) + runs_of(p.rope);
    const u64 head = thread_index() / runs;
    const u32 run = thread_index() % runs;
    if (head >= u64(p.tokens) * p.heads) {
        return;
    }
    if (vectors(p.nope | p.rope, given.x, given.out)) {
        query_run<true>(given, head, run);
    } else {
        query_run<false>(given, head, run);
    }
}
