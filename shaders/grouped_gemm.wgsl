// Matrix products over ragged groups of rows: NUMERICS.md, "Matrix products".
//
// A workgroup computes 8 TILE x 8 TILE outputs of one group, an invocation TILE x TILE of them. The order along the chain
// makes the bits, not the tile.
//
// Constants: those of operands.wgsl; RAGGED_CHAIN (the groups divide the chain: Wgrad); FP8_BLOCKS (e4m3 codes with scales
// of 128); ACCUMULATE; IN_PARTS (each 128 terms of the chain make a part, and the parts are added); PLANE_PAIRS (how often
// the terms of a part go by: for each pair of planes of split factors, else once); A_PLANES, B_PLANES (which planes these
// are, four bits each from the lowest on).

fn left_term_of(value: u32) -> Term {
    return term_of(value);
}

fn term_of(value: u32) -> Term {
    if MODEL == 1u && FP8_BLOCKS == 1u { // decided
        return term_from_e4m3(value);
    } else if MODEL == 1u { // decided
        return term_from_bf16(value);
    } else if FP8_BLOCKS == 1u { // decided
        return Term(0, i32(e4m3_to_f32(value)));
    } else {
        return Term(0, i32(value));
    }
}

// Where row `i` of `a` or `b` begins, rows being `stride` apart; a gather that is not there is some other tensor.
fn a_row_place(i: u32, stride: u32) -> u32 {
    let gathered = given.scalars.a_gathered == 1u;
    let source = select(i, a_gather_at(select(0u, i, gathered)), gathered);
    return select(source * stride, NOWHERE, gathered && source >= given.scalars.a_sources);
}

fn b_row_place(i: u32, stride: u32) -> u32 {
    let gathered = given.scalars.b_gathered == 1u;
    let source = select(i, b_gather_at(select(0u, i, gathered)), gathered);
    return select(source * stride, NOWHERE, gathered && source >= given.scalars.b_sources);
}

fn a_place(t: u32) -> u32 {
    if RAGGED_CHAIN == 1u { // decided
        return a_row_place(t, given.scalars.a_chain);
    } else {
        return t * given.scalars.a_chain;
    }
}

fn b_place(t: u32) -> u32 {
    if RAGGED_CHAIN == 1u { // decided
        return b_row_place(t, given.scalars.b_chain);
    } else {
        return t * given.scalars.b_chain;
    }
}

// The product of the FP8-block scales of a row and a column for the block that t lies in; the scale of a gathered row that
// is not there is +0. Those of a weight also span 128 of its columns, and where the groups divide the chain, those of a block
// lie side by side.
fn block_scale(group: u32, row: u32, column: u32, t: u32) -> u32 {
    let p = given.scalars;
    let block = t / 128u;
    if RAGGED_CHAIN == 1u { // decided
        return f32_mul(a_scale_at(block * p.rows + row), b_scale_at(block * p.columns + column));
    } else {
        let gathered = p.a_gathered == 1u;
        let source = select(row, a_gather_at(select(0u, row, gathered)), gathered);
        let there = (!gathered) || (source < p.a_sources);
        let a_scale = select(0u, a_scale_at(select(0u, source, there) * p.scale_chain + block), there);
        let b_row = group * ((p.columns + 127u) / 128u) + column / 128u;
        return f32_mul(a_scale, b_scale_at(b_row * p.scale_chain + block));
    }
}

// The planes that rows and columns are in.
var<private> a_plane: u32;
var<private> b_plane: u32;

fn enter_planes(pair: u32) {
    if PLANE_PAIRS == 1u { // decided
        return;
    } else {
        let a = ((A_PLANES >> (4u * pair)) & 3u) * given.scalars.a_plane;
        let b = ((B_PLANES >> (4u * pair)) & 3u) * given.scalars.b_plane;
        for (var i = 0u; i < TILE; i += 1u) { // unrolled
            // A gathered row that is not there is in no plane.
            rows[i] = select(rows[i] + a - a_plane, NOWHERE, rows[i] == NOWHERE);
            columns[i] += b - b_plane;
        }
        a_plane = a;
        b_plane = b;
    }
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let place = linear(workgroup, workgroups);
    let column = ((place % p.column_tiles) * 8u + lane % 8u) * TILE;

    // The group of this tile of rows. In Wgrad every group has the same rows.
    let last = offsets_at(p.groups);
    var tile = place / p.column_tiles;
    var group = 0u;
    var begin = 0u;
    var end = 0u;
    for (; group < p.groups; group += 1u) {
        begin = end;
        end = counted_offset(begin, offsets_at(group + 1u), last, p.offsets_end) / p.offsets_block * p.offsets_block;
        let rows = select(end - begin, p.rows, RAGGED_CHAIN == 1u);
        let tiles = (rows + 8u * TILE - 1u) / (8u * TILE);
        if tile < tiles {
            break;
        }
        tile -= tiles;
    }
    var row = (tile * 8u + lane / 8u) * TILE;
    var last_row = p.rows;
    var chain_begin = begin;
    var chain_end = end;
    if RAGGED_CHAIN == 0u {
        row += begin;
        last_row = end;
        chain_begin = 0u;
        chain_end = p.chain;
    }
    let nothing = ACCUMULATE == 1u && chain_begin == chain_end;
    if group == p.groups || row >= last_row || column >= p.columns || nothing {
        return;
    }

    // Rows past the last repeat it, and are not written.
    for (var i = 0u; i < TILE; i += 1u) { // unrolled
        let r = min(row + i, last_row - 1u);
        if RAGGED_CHAIN == 0u { // decided
            rows[i] = a_row_place(r, p.a_row);
        } else {
            rows[i] = r * p.a_row;
        }
        columns[i] = group * p.b_group + min(column + i, p.columns - 1u) * p.b_column;
    }

    // In a product in parts `acc` is the chain of the present block, and `total` the sum of those before, in the end `acc`
    // too.
    var total: array<array<u32, TILE>, TILE>;
    let block = select(max(chain_end - chain_begin, 1u), 128u, IN_PARTS == 1u);
    for (var t = chain_begin; t < chain_end; t += block) {
        for (var pair = 0u; pair < PLANE_PAIRS; pair += 1u) {
            enter_planes(pair);
            continue_chains(t, min(t + block, chain_end));
        }
        if IN_PARTS == 1u { // decided
            enter_planes(0u);
            for (var r = 0u; r < TILE; r += 1u) {
                for (var c = 0u; c < TILE; c += 1u) {
                    if FP8_BLOCKS == 1u { // decided
                        let scale = block_scale(group, min(row + r, last_row - 1u), min(column + c, p.columns - 1u), t);
                        total[r][c] = f32_fma(acc[0][0], scale, total[r][c]);
                    } else {
                        total[r][c] = f32_add(total[r][c], acc[0][0]);
                    }
                    acc[0][0] = select(0u, total[r][c], t + block >= chain_end);
                    turn_columns();
                }
                turn_rows();
            }
        }
    }

    for (var r = 0u; r < TILE; r += 1u) {
        for (var c = 0u; c < TILE; c += 2u) {
            let i = (group * p.out_group + row + r) * p.columns + column + c;
            var first = acc[0][0];
            turn_columns();
            var second = acc[0][0];
            turn_columns();
            if row + r < last_row && column + c < p.columns {
                if ACCUMULATE == 1u { // decided
                    first = f32_add(out_at(i), first);
                    second = f32_add(out_at(i + 1u), second);
                }
                if column + c + 1u < p.columns {
                    out_set_two(i, first, second);
                } else {
                    out_set(i, first);
                }
            }
        }
        turn_rows();
    }
}
