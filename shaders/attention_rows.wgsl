// What belongs to rows, chains along the keys: NUMERICS.md, "Attention". Forward, step 5 and the end, probabilities
// times values; backward, step 3, slopes times keys, without `alpha` and `reciprocals`. A workgroup has 8 TILE rows
// and 8 TILE columns of a head, an invocation TILE of each.

fn left_term_of(value: u32) -> Term {
    return seen_term_of(value);
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let place = linear(workgroup, workgroups);
    let side = 8u * TILE;
    let row_tiles = (p.width + side - 1u) / side;
    let column_tiles = (p.columns + side - 1u) / side;
    let column = (place % column_tiles * 8u + lane % 8u) * TILE;
    let row = p.row + (place / column_tiles % row_tiles * 8u + lane / 8u) * TILE;
    let pair = place / column_tiles / row_tiles;
    if pair >= p.pairs || row >= min(p.row + p.width, p.sequence) || column >= p.columns {
        return;
    }

    let tiles = (p.keys + KEY_TILE - 1u) / KEY_TILE;
    for (var i = 0u; i < TILE; i += 1u) { // unrolled
        rows[i] = score_place(pair, 0u, row + i);
        columns[i] = key_of(pair, 0u) * p.columns + min(column + i, p.columns - 1u);
    }
    let first = first_key_of_tile(pair, row) / STEP * STEP;
    let end = min(row + TILE, p.sequence);
    for (var tile = first / KEY_TILE; tile * KEY_TILE < end; tile += 1u) {
        if alpha_given() {
            for (var r = 0u; r < TILE; r += 1u) {
                let alpha = alpha_at((pair * tiles + tile) * p.width + row - p.row + r);
                for (var c = 0u; c < TILE; c += 1u) {
                    acc[0][0] = f32_mul(acc[0][0], alpha);
                    turn_columns();
                }
                turn_rows();
            }
        }
        continue_chains(max(first, tile * KEY_TILE), min(end, (tile + 1u) * KEY_TILE));
    }
    for (var r = 0u; r < TILE; r += 1u) {
        let reciprocal = reciprocals_at(pair * p.width + min(row + r, p.sequence - 1u) - p.row);
        let factor = select(p.scale, reciprocal, reciprocals_given());
        let out_row = query_of(pair, row + r) * p.columns;
        for (var c = 0u; c < TILE; c += 1u) {
            if row + r < p.sequence && column + c < p.columns {
                out_set(out_row + column + c, f32_mul(end_of(acc[0][0]), factor));
            }
            turn_columns();
        }
        turn_rows();
    }
}
