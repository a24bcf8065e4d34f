// Some columns of every row to other columns of another tensor.

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
    let row = i / p.width;
    let column = i % p.width;
    out_set(row * p.out_columns + p.out_column + column, x_at(row * p.x_columns + p.x_column + column));
}
