// Rows by index; a row without one stays as it is, and so does one whose index lies outside. A thread has a run.

extern "C" __global__ void __launch_bounds__(128) gather_rows(const __grid_constant__ Given given) {
    begin(given);
    const Params& p = given.params;
    const Place place = place_of(thread_index(), p.columns);
    if (place.row >= p.rows) {
        return;
    }
    const u32 source = given.index[place.row];
    if (source >= p.sources) {
        return;
    }
    const u64 from = u64(source) * p.columns + place.column, to = place.row * p.columns + place.column;
    if (vectors(p.columns, given.x, given.out)) {
        copy_run<true>(given.out, to, given.x, from, RUN);
    } else {
        copy_run<false>(given.out, to, given.x, from, run_length<false>(place.column, p.columns));
    }
}
