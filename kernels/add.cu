// a + b, or (a + b) + c: NUMERICS.md, "Row-wise ops". A thread has a run.

template <bool VECTOR>
__device__ __forceinline__ void add_run(const Given& given, u64 i, u32 n) {
    Run sum = load_run<VECTOR>(given.a, i, n);
    const Run b = load_run<VECTOR>(given.b, i, n);
    Run c;
    if constexpr (c_given) {
        c = load_run<VECTOR>(given.c, i, n);
    }
#pragma unroll
    for (u32 e = 0; e < RUN; ++e) {
        sum.at[e] += b.at[e];
        if constexpr (c_given) {
            sum.at[e] += c.at[e];
        }
    }
    store_run<VECTOR>(given.out, i, n, sum);
}

extern "C" __global__ void __launch_bounds__(128) add(const __grid_constant__ Given given) {
    begin(given);
    const u64 elements = given.scalars.elements, i = thread_index() * RUN;
    if (i >= elements) {
        return;
    }
    if (vectors(elements, given.a, given.b, given.c, given.out)) {
        add_run<true>(given, i, RUN);
    } else {
        add_run<false>(given, i, run_length<false>(i, elements));
    }
}
