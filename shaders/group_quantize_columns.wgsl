// Blocks along the columns, never across two groups: NUMERICS.md, "Block formats". An invocation has a block.
//
// Constants: BLOCK; TRANSPOSED (codes are stored column by column); PADDED (groups start at a multiple of the block in
// the result, and what pads them is zero); those of blocks.wgsl.

// Where group g ends; the one before ends at `begin`.
fn end_of_group(g: u32, begin: u32) -> u32 {
    if offsets_given() {
        return counted_offset(begin, offsets_at(g + 1u), offsets_at(given.scalars.groups), given.scalars.group_rows);
    }
    return (g + 1u) * given.scalars.group_rows;
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let i = linear(group, groups) * 64u + lane;
    if i >= p.elements {
        return;
    }
    var block = i / p.columns;
    let column = i % p.columns;
    // The group of this block, and the blocks of the groups before.
    var g = 0u;
    var first = 0u;
    var begin = 0u;
    var end = 0u;
    for (; g < p.groups; g += 1u) {
        begin = end;
        end = end_of_group(g, begin);
        let blocks = (end - begin + BLOCK - 1u) / BLOCK;
        if block < blocks {
            break;
        }
        block -= blocks;
        first += blocks;
    }
    if g == p.groups {
        return;
    }
    let top = begin + block * BLOCK;
    let bottom = min(top + BLOCK, end);
    var amax = 0u;
    if squares_given() {
        amax = squares_at((first + block) * p.row_blocks + column / BLOCK);
    } else {
        for (var row = top; row < bottom; row += 1u) {
            amax = max(amax, magnitude_of(x_at(row * p.columns + column)));
        }
    }
    var scale = fp8_scale(amax);
    if FORMAT == MXFP8 {
        scale = mxfp8_scale(amax);
    }
    // Rows in the result: of all groups, or of each.
    let height = select(p.group_rows, p.padded_rows, PADDED == 1u);
    var place = (first + block) * BLOCK * p.columns + column;
    var step = p.columns;
    var scale_place = (first + block) * p.columns + column;
    if TRANSPOSED == 1u {
        place = column * height + select(g * p.group_rows * p.columns + block * BLOCK, (first + block) * BLOCK, PADDED == 1u);
        step = 1u;
    }
    for (var n = 0u; n < select(bottom - top, BLOCK, PADDED == 1u); n += 1u) {
        var code = 0u;
        if top + n < bottom {
            code = e4m3_from_f32(f32_mul(x_at((top + n) * p.columns + column), scale.factor));
        }
        codes_set(place + n * step, code);
    }
    scales_set(scale_place, scale.stored);
}
