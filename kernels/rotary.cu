// Rotary embedding: the last columns of each head rotated (or back), those before them (the queries of latent attention
// have such) copied. A thread has a run of columns that are copied, or the pairs of a run.

template <bool VECTOR>
__device__ __forceinline__ void head_run(const Given& given, u64 head, u32 run) {
    const Scalars& p = given.scalars;
    const u32 copied = runs_of(p.nope);
    const u64 base = head * (p.nope + 2 * p.pairs), part = base + p.nope;
    if (run < copied) {
        const u32 start = run * RUN;
        copy_run<VECTOR>(given.out, base + start, given.x, base + start, run_length<VECTOR>(start, p.nope));
        return;
    }
    const Angles angles = angles_of(given.cos, given.sin, given.positions[head / p.heads], p.table_rows, p.pairs);
    const auto load = [&](u32 column, u32 n) { return load_run<VECTOR>(given.x, part + column, n); };
    const auto store = [&](u32 column, u32 n, const Run& x) { store_run<VECTOR>(given.out, part + column, n, x); };
    rotate_run<VECTOR>((run - copied) * RUN, p.pairs, p.halves, angles, p.inverse != 0, load, store);
}

extern "C" __global__ void __launch_bounds__(128) rotary(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 stretch = rotated_stretch(p.pairs, p.halves), runs = runs_of(p.nope) + runs_of(stretch);
    const u64 head = thread_index() / runs;
    const u32 run = thread_index() % runs;
    if (head >= u64(p.tokens) * p.heads) {
        return;
    }
    if (vectors(p.nope | stretch, given.x, given.out)) {
        head_run<true>(given, head, run);
    } else {
        head_run<false>(given, head, run);
    }
}
