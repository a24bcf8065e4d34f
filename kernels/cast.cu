// Conversion between float types: NUMERICS.md, "Row-wise ops". A thread has a run.

extern "C" __global__ void __launch_bounds__(128) cast(const __grid_constant__ Given given) {
    begin(given);
    const u64 elements = given.scalars.elements, i = thread_index() * RUN;
    if (i >= elements) {
        return;
    }
    if (vectors(elements, given.x, given.out)) {
        copy_run<true>(given.out, i, given.x, i, RUN);
    } else {
        copy_run<false>(given.out, i, given.x, i, run_length<false>(i, elements));
    }
}
