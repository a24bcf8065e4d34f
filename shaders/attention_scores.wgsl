// Products of rows and keys along a head: NUMERICS.md, "Attention". A workgroup has 8 TILE rows and
// 8 TILE keys, an invocation TILE of each. A tile of which no row sees a key is left unwritten.

fn left_term_of(value: u32) -> Term {
    return term_of(value);
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
    let key_tiles = (p.keys + side - 1u) / side;
    let row = p.row + (place % row_tiles * 8u + lane % 8u) * TILE;
    let key = (place / row_tiles % key_tiles * 8u + lane / 8u) * TILE;
    let pair = place / row_tiles / key_tiles;
    if pair >= p.pairs || row >= p.row + p.width || key >= p.keys {
        return;
    }
    if key >= row + TILE || key + TILE <= first_key_of_tile(pair, row) {
        return;
    }

    for (var i = 0u; i < TILE; i += 1u) { // unrolled
        rows[i] = query_of(pair, min(row + i, p.sequence - 1u)) * p.columns;
        columns[i] = key_of(pair, min(key + i, p.sequence - 1u)) * p.columns;
    }
    continue_chains(0u, p.columns);
    for (var r = 0u; r < TILE; r += 1u) {
        for (var c = 0u; c < TILE; c += 1u) {
            scores_set(score_place(pair, key + c, row + r), acc[0][0]);
            turn_columns();
        }
        turn_rows();
    }
}
