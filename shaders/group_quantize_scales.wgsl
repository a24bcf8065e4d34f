// The FP8-block scales of square blocks, as stored for rows and for transposed columns. An invocation has a square.

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
    let scale = fp8_scale(squares_at(i)).stored;
    row_scales_set(i, scale);
    let matrix = i / (p.grid_rows * p.row_blocks);
    let place = i % (p.grid_rows * p.row_blocks);
    let turned = place % p.row_blocks * p.grid_rows + place / p.row_blocks;
    column_scales_set(matrix * p.grid_rows * p.row_blocks + turned, scale);
}
