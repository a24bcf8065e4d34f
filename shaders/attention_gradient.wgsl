// The gradients of queries, keys and values: NUMERICS.md, "Attention", backward, steps 2 and 3. A workgroup has 8 TILE
// outputs along the sequence and 8 TILE columns of a head, an invocation TILE of each.
//
// ALONG_ROWS: the outputs belong to keys, and their chains run along the rows and on through the pieces, between which
// `sums` holds them. Else the outputs belong to rows, and a piece has all their keys.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.params;
    let place = linear(workgroup, workgroups);
    let side = 8u * TILE;
    var output = p.row;
    var outputs = p.width;
    if ALONG_ROWS == 1u {
        output = 0u;
        outputs = p.keys;
    }
    let output_tiles = (outputs + side - 1u) / side;
    let column_tiles = (p.columns + side - 1u) / side;
    let column = (place % column_tiles * 8u + lane % 8u) * TILE;
    output += (place / column_tiles % output_tiles * 8u + lane / 8u) * TILE;
    let pair = place / column_tiles / output_tiles;
    if pair >= p.pairs || output >= min(p.row + p.width, p.sequence) || column >= p.columns {
        return;
    }

    var begin = 0u;
    var end = min(output + TILE, p.sequence);
    if ALONG_ROWS == 1u {
        begin = max(p.row, output / STEP * STEP);
        end = min(p.row + p.width, p.sequence);
        // Rows before a key do not see it, so its chain begins in the piece that holds its own row.
        let continues = p.continues == 1u || output < p.row;
        for (var i = 0u; i < TILE; i += 1u) { // unrolled
            // The place of row 0, which may lie before the piece.
            rows[i] = score_place(pair, output + i, 0u);
            columns[i] = query_of(pair, 0u) * p.columns + min(column + i, p.columns - 1u);
        }
        if continues {
            for (var r = 0u; r < TILE; r += 1u) {
                for (var c = 0u; c < TILE; c += 1u) {
                    if output + r < p.sequence && column + c < p.columns {
                        acc[0][0] = sums_at((pair * p.sequence + output + r) * p.columns + column + c);
                    }
                    turn_columns();
                }
                turn_rows();
            }
        }
    } else {
        begin = first_key_of_tile(pair, output) / STEP * STEP;
        for (var i = 0u; i < TILE; i += 1u) { // unrolled
            rows[i] = score_place(pair, 0u, output + i);
            columns[i] = key_of(pair, 0u) * p.columns + min(column + i, p.columns - 1u);
        }
    }
    continue_chains(begin, end);

    for (var r = 0u; r < TILE; r += 1u) {
        var out_row = query_of(pair, output + r);
        if ALONG_ROWS == 1u {
            out_row = key_of(pair, output + r);
        }
        for (var c = 0u; c < TILE; c += 1u) {
            if output + r < p.sequence && column + c < p.columns {
                if p.complete == 1u {
                    out_set(out_row * p.columns + column + c, f32_mul(acc[0][0], p.scale));
                } else {
                    sums_set((pair * p.sequence + output + r) * p.columns + column + c, acc[0][0]);
                }
            }
            turn_columns();
        }
        turn_rows();
    }
}
