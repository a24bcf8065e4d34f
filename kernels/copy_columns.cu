// Some columns of every row to other columns of another tensor. A thread has a run.

extern "C" __global__ void __launch_bounds__(128) copy_columns(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const Place place = place_of(thread_index(), p.width);
    if (place.row >= p.rows) {
        return;
    }
    const u64 from = place.row * p.x_columns + p.x_column + place.column;
    const u64 to = place.row * p.out_columns + p.out_column + place.column;
    if (vectors(p.width | p.x_columns | p.x_column | p.out_columns | p.out_column, given.x, given.out)) {
        copy_run<true>(given.out, to, given.x, from, RUN);
    } else {
        copy_run<false>(given.out, to, given.x, from, run_length<false>(place.column, p.width));
    }
}
