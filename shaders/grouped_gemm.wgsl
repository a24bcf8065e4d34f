// Matrix products over ragged groups of rows: NUMERICS.md, "Matrix products".
//
// A workgroup computes ROWS x LANES outputs of one group: a lane has a column and ROWS accumulators. The terms of `a`,
// which all lanes share, lie in `tile`, DEPTH of each row at a time; a lane decodes the terms of its own column once for
// all rows. Rows of a tile past the group's end are computed from zeros and not written.
//
// Constants: RAGGED_CHAIN (the groups divide the chain: Wgrad), FORMAT, MODEL, ACCUMULATE.

const ROWS: u32 = 8u;
const LANES: u32 = 64u;
const DEPTH: u32 = 32u;

const PLAIN_F32: u32 = 0u;
const PLAIN_BF16: u32 = 1u;
const MXFP8: u32 = 2u;
const FP8_BLOCK: u32 = 3u;

var<workgroup> tile: array<u32, 256>;

// What MODEL adds up: f32 bits, or terms of a matrix unit.
fn word_of(code: u32, scale: u32) -> u32 {
    if FORMAT == FP8_BLOCK {
        if MODEL == 0u {
            return e4m3_to_f32(code);
        }
        return term_from_e4m3(code);
    }
    var value = code;
    if FORMAT == MXFP8 {
        value = bf16_round(f32_mul(e4m3_to_f32(code), ue8m0_to_f32(scale)));
    }
    if FORMAT == PLAIN_F32 || MODEL == 0u {
        return value;
    }
    return term_from_bf16(value >> 16u);
}

// Element t along the chain of row i of the first factor.
fn a_word(row: u32, t: u32) -> u32 {
    let p = given.params;
    var i = row;
    var j = t;
    var scale = 0u;
    if a_gather_given {
        if RAGGED_CHAIN == 1u {
            j = a_gather_at(t);
        } else {
            i = a_gather_at(row);
        }
    }
    if FORMAT == MXFP8 {
        scale = a_scale_at(row * p.a_scale_row + (t / 32u) * p.a_scale_chain);
    }
    return word_of(a_at(i * p.a_row + j * p.a_chain), scale);
}

// Element t along the chain of column j of the second factor.
fn b_word(group: u32, column: u32, t: u32) -> u32 {
    let p = given.params;
    var j = t;
    var scale = 0u;
    if b_gather_given {
        j = b_gather_at(t);
    }
    if FORMAT == MXFP8 {
        scale = b_scale_at(group * p.b_scale_group + column * p.b_scale_column + (t / 32u) * p.b_scale_chain);
    }
    return word_of(b_at(group * p.b_group + column * p.b_column + j * p.b_chain), scale);
}

// The product of two FP8-block scales; t is the first element of a block.
fn block_scale(group: u32, row: u32, column: u32, t: u32) -> u32 {
    let p = given.params;
    let a_scale = a_scale_at(row * p.a_scale_row + t / 128u);
    let b_row = column / p.b_scale_columns;
    return f32_mul(a_scale, b_scale_at(group * p.b_scale_group + b_row * p.b_scale_column + t / 128u));
}

fn fma_chain(base: u32, column: ptr<function, array<u32, STEP>>, length: u32, start: u32) -> u32 {
    var acc = start;
    for (var i = 0u; i < length; i += 1u) {
        acc = f32_fma(tile[base + i], (*column)[i], acc);
    }
    return acc;
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.params;
    let place = linear(workgroup, workgroups);
    let column = (place % p.column_tiles) * LANES + lane;

    // The group of this tile of rows: the output's rows in Wgrad are the same for each group.
    var left = place / p.column_tiles;
    var group = 0u;
    var begin = 0u;
    var end = 0u;
    for (; group < p.groups; group += 1u) {
        begin = offsets_at(group);
        end = offsets_at(group + 1u);
        let rows = select(end - begin, p.rows, RAGGED_CHAIN == 1u);
        let tiles = (rows + ROWS - 1u) / ROWS;
        if left < tiles {
            break;
        }
        left -= tiles;
    }
    if group == p.groups {
        return;
    }
    var first_row = left * ROWS;
    var last_row = p.rows;
    var chain_start = begin;
    var chain_end = end;
    if RAGGED_CHAIN == 0u {
        first_row += begin;
        last_row = end;
        chain_start = 0u;
        chain_end = p.chain;
    }
    if ACCUMULATE == 1u && chain_start == chain_end {
        return;
    }

    // The chain of each row; under FP8 blocks that of the present block, and `total` the sum of the blocks before.
    var acc: array<u32, ROWS>;
    var total: array<u32, ROWS>;
    for (var first = chain_start; first < chain_end; first += DEPTH) {
        workgroupBarrier();
        for (var i = lane; i < ROWS * DEPTH; i += LANES) {
            let row = first_row + i / DEPTH;
            let t = first + i % DEPTH;
            var word = 0u;
            if row < last_row && t < chain_end {
                word = a_word(row, t);
            }
            tile[i] = word;
        }
        workgroupBarrier();
        for (var s = 0u; s < DEPTH && first + s < chain_end; s += STEP) {
            var mine: array<u32, STEP>;
            let length = min(STEP, chain_end - first - s);
            for (var i = 0u; i < STEP; i += 1u) {
                var word = 0u;
                if column < p.columns && i < length {
                    word = b_word(group, column, first + s + i);
                }
                mine[i] = word;
            }
            for (var r = 0u; r < ROWS; r += 1u) {
                if MODEL == 0u || FORMAT == PLAIN_F32 {
                    acc[r] = fma_chain(r * DEPTH + s, &mine, length, acc[r]);
                } else {
                    acc[r] = mma_step(r * DEPTH + s, &mine, acc[r]);
                }
            }
        }
        if FORMAT == FP8_BLOCK {
            let done = first + DEPTH - chain_start;
            if done % 128u == 0u || first + DEPTH >= chain_end {
                let block = first - first % 128u;
                for (var r = 0u; r < ROWS; r += 1u) {
                    if first_row + r < last_row && column < p.columns {
                        total[r] = f32_fma(acc[r], block_scale(group, first_row + r, column, block), total[r]);
                    }
                    acc[r] = 0u;
                }
            }
        }
    }

    for (var r = 0u; r < ROWS; r += 1u) {
        let row = first_row + r;
        if row < last_row && column < p.columns {
            let result = select(acc[r], total[r], FORMAT == FP8_BLOCK);
            let i = (group * p.out_group + row) * p.columns + column;
            if ACCUMULATE == 1u {
                out_set(i, f32_add(out_at(i), result));
            } else {
                out_set(i, result);
            }
        }
    }
}
