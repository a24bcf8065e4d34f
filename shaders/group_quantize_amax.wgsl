// The amax of squares of stacked matrices, or of a whole tensor. An invocation has the part of a row that lies in one block.
//
// Constants: BLOCK; SQUARES (1: of each square).

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
    let row = i / p.row_blocks;
    let block = i % p.row_blocks;
    if offsets_given() && row >= offsets_at(p.groups) {
        return;
    }
    var amax = 0u;
    for (var column = block * BLOCK; column < min((block + 1u) * BLOCK, p.columns); column += 1u) {
        amax = max(amax, magnitude_of(x_at(row * p.columns + column)));
    }
    let down = row / p.group_rows * p.grid_rows + row % p.group_rows / BLOCK;
    amax_max(select(0u, down * p.row_blocks + block, SQUARES == 1u), amax);
}
