// Rotary embedding in halves. A thread has a run of pairs: columns j and j + half of a head.

template <bool VECTOR>
__device__ __forceinline__ void rotate_halves(const Given& given, Place place) {
    const Scalars& p = given.scalars;
    const u32 n = run_length<VECTOR>(place.column, p.half);
    const u64 at = place.row * 2 * p.half + place.column, token = place.row / p.heads;
    const Angles angles = angles_of(given.cos, given.sin, given.positions[token], p.table_rows, p.half);
    Run a = load_run<VECTOR>(given.x, at, n), b = load_run<VECTOR>(given.x, at + p.half, n);
#pragma unroll
    for (u32 e = 0; e < RUN; ++e) {
        if (e < n) {
            const Pair x = rotate({a.at[e], b.at[e]}, angles, place.column + e, p.inverse != 0);
            a.at[e] = x.a;
            b.at[e] = x.b;
        }
    }
    store_run<VECTOR>(given.out, at, n, a);
    store_run<VECTOR>(given.out, at + p.half, n, b);
}

extern "C" __global__ void __launch_bounds__(128) rotary(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    // A row is a head of a token.
    const Place place = place_of(thread_index(), p.half);
    if (place.row >= u64(p.tokens) * p.heads) {
        return;
    }
    if (vectors(p.half, given.x, given.out)) {
        rotate_halves<true>(given, place);
    } else {
        rotate_halves<false>(given, place);
    }
}
