// Rows by index; a row without one stays as it is, and so does one whose index lies outside. A warp has a row.

extern "C" __global__ void __launch_bounds__(128) gather_rows(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const bool vector = vectors(p.columns, given.x, given.out);
    for (u64 row = warp_index(); row < p.rows; row += warp_count()) {
        const u32 source = given.index[row];
        if (source >= p.sources) {
            continue;
        }
        const auto to = given.out + row * p.columns;
        const auto from = given.x + u64(source) * p.columns;
        if (vector) {
            copy_row<true>(to, from, p.columns);
        } else {
            copy_row<false>(to, from, p.columns);
        }
    }
}
