// One value everywhere. A thread has a run.

extern "C" __global__ void __launch_bounds__(128) fill(const __grid_constant__ Given given) {
    begin(given);
    const u64 elements = given.scalars.elements, i = thread_index() * RUN;
    if (i >= elements) {
        return;
    }
    Run run;
#pragma unroll
    for (u32 e = 0; e < RUN; ++e) {
        run.at[e] = __uint_as_float(given.scalars.value);
    }
    if (vectors(elements, given.out)) {
        store_run<true>(given.out, i, RUN, run);
    } else {
        store_run<false>(given.out, i, run_length<false>(i, elements), run);
    }
}
