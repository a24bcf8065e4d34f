// One product for each head of each sequence, whose chains continue from `sums`: NUMERICS.md, "Attention".
//
// sums: [batch, heads, sum_rows, columns] f32, of which `rows` rows from `first_row` on take part. A workgroup computes
// 8 TILE x 8 TILE of them, an invocation TILE x TILE.
//
// Constants: those of mma.wgsl and operands.wgsl; MODEL (0: a chain of f32 fma).

fn word_of(value: u32) -> u32 {
    if MODEL == 0u {
        return value;
    }
    return term_from_bf16(value >> 16u);
}

fn a_place(t: u32) -> u32 {
    return t * given.params.a_chain;
}

fn b_place(t: u32) -> u32 {
    return t * given.params.b_chain;
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.params;
    let tile = linear(group, groups);
    let column = (tile % p.column_tiles * 8u + lane % 8u) * TILE;
    let row = (tile / p.column_tiles % p.row_tiles * 8u + lane / 8u) * TILE;
    let head_of_all = tile / (p.column_tiles * p.row_tiles);
    if head_of_all >= p.heads_of_all || row >= p.rows || column >= p.columns {
        return;
    }
    let sequence = head_of_all / p.heads;
    let head = head_of_all % p.heads;
    var rows: array<u32, TILE>;
    var columns: array<u32, TILE>;
    for (var i = 0u; i < TILE; i += 1u) {
        let a_head = p.a_first + sequence * p.a_sequence + head * p.a_head;
        rows[i] = a_head + min(row + i, p.rows - 1u) * p.a_row;
        let b_head = p.b_first + sequence * p.b_sequence + head / p.b_share * p.b_head;
        columns[i] = b_head + min(column + i, p.columns - 1u) * p.b_column;
    }

    let base = (head_of_all * p.sum_rows + p.first_row + row) * p.columns + column;
    var acc: array<array<u32, TILE>, TILE>;
    for (var r = 0u; r < TILE; r += 1u) {
        for (var c = 0u; c < TILE; c += 1u) {
            if row + r < p.rows && column + c < p.columns {
                acc[r][c] = sums_at(base + r * p.columns + c);
                if factors_given {
                    acc[r][c] = f32_mul(acc[r][c], factors_at(head_of_all * p.sum_rows + p.first_row + row + r));
                }
            }
        }
    }
    for (var t = 0u; t < p.chain; t += STEP) {
        fill_left(rows, t, p.chain);
        fill_right(columns, t, p.chain);
        for (var r = 0u; r < TILE; r += 1u) {
            for (var c = 0u; c < TILE; c += 1u) {
                if MODEL == 0u {
                    acc[r][c] = fma_step(r, c, p.chain - t, acc[r][c]);
                } else {
                    acc[r][c] = mma_step(r, c, acc[r][c]);
                }
            }
        }
    }
    for (var r = 0u; r < TILE; r += 1u) {
        for (var c = 0u; c < TILE; c += 1u) {
            if row + r < p.rows && column + c < p.columns {
                sums_set(base + r * p.columns + c, acc[r][c]);
            }
        }
    }
}
