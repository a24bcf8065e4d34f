// Keys and values of latent attention: each head's key is its own columns and the rotated shared ones. A thread has a
// run of the key's own columns or of the value, or the pairs of a run of the shared columns.

template <bool VECTOR>
__device__ __forceinline__ void key_value_run(const Given& given, u64 head, u32 run) {
    const Scalars& p = given.scalars;
    const u32 own = runs_of(p.nope), key = own + runs_of(rotated_stretch(p.pairs, p.halves)), rope = 2 * p.pairs;
    const u64 joint_base = head * (p.nope + p.v), key_base = head * (p.nope + rope);
    if (run < own) {
        const u32 start = run * RUN;
        copy_run<VECTOR>(given.k, key_base + start, given.kv, joint_base + start, run_length<VECTOR>(start, p.nope));
    } else if (run < key) {
        const u64 token = head / p.heads, shared = token * rope, part = key_base + p.nope;
        const Angles angles = angles_of(given.cos, given.sin, given.positions[token], p.table_rows, p.pairs);
        const auto load = [&](u32 column, u32 n) { return load_run<VECTOR>(given.k_rope, shared + column, n); };
        const auto store = [&](u32 column, u32 n, const Run& x) { store_run<VECTOR>(given.k, part + column, n, x); };
        rotate_run<VECTOR>((run - own) * RUN, p.pairs, p.halves, angles, false, load, store);
    } else {
        const u32 start = (run - key) * RUN;
        const u64 from = joint_base + p.nope + start;
        copy_run<VECTOR>(given.v, head * p.v + start, given.kv, from, run_length<VECTOR>(start, p.v));
    }
}

extern "C" __global__ void __launch_bounds__(128) mla_key_value(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 stretch = rotated_stretch(p.pairs, p.halves);
    const u32 runs = runs_of(p.nope) + runs_of(stretch) + runs_of(p.v);
    const u64 head = thread_index() / runs;
    const u32 run = thread_index() % runs;
    if (head >= u64(p.tokens) * p.heads) {
        return;
    }
    if (vectors(p.nope | stretch | p.v, given.kv, given.k_rope, given.k, given.v)) {
        key_value_run<true>(given, head, run);
    } else {
        key_value_run<false>(given, head, run);
    }
}
