// What belongs to keys, the gradients of keys and values: NUMERICS.md, "Attention", backward, step 2. The chains run
// along the rows and on through the pieces, between which `sums` holds them. A workgroup has 8 TILE keys and 8 TILE
// columns of a head, an invocation TILE of each.

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
    let key_tiles = (p.keys + side - 1u) / side;
    let column_tiles = (p.columns + side - 1u) / side;
    let column = (place % column_tiles * 8u + lane % 8u) * TILE;
    let key = (place / column_tiles % key_tiles * 8u + lane / 8u) * TILE;
    let pair = place / column_tiles / key_tiles;
    let end = min(p.row + p.width, p.sequence);
    if pair >= p.pairs || key >= end || column >= p.columns {
        return;
    }

    for (var i = 0u; i < TILE; i += 1u) { // unrolled
        // The place of row 0, which may lie before the piece.
        rows[i] = score_place(pair, key + i, 0u);
        columns[i] = query_of(pair, 0u) * p.columns + min(column + i, p.columns - 1u);
    }
    // Rows before a key do not see it, so its chain begins in the piece that holds its own row.
    if p.continues == 1u || key < p.row {
        for (var r = 0u; r < TILE; r += 1u) {
            for (var c = 0u; c < TILE; c += 1u) {
                if key + r < p.sequence && column + c < p.columns {
                    acc[0][0] = sums_at((pair * p.sequence + key + r) * p.columns + column + c);
                }
                turn_columns();
            }
            turn_rows();
        }
    }
    continue_chains(max(p.row, key / STEP * STEP), end);

    for (var r = 0u; r < TILE; r += 1u) {
        let out_row = key_of(pair, key + r) * p.columns;
        for (var c = 0u; c < TILE; c += 1u) {
            if key + r < p.sequence && column + c < p.columns {
                if p.complete == 1u {
                    out_set(out_row + column + c, f32_mul(end_of(acc[0][0]), p.scale));
                } else {
                    sums_set((pair * p.sequence + key + r) * p.columns + column + c, acc[0][0]);
                }
            }
            turn_columns();
        }
        turn_rows();
    }
}
