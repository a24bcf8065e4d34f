// Rows by index; a row whose index lies outside stays as it is.

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
    let row = index_at(i / p.columns);
    if row < p.sources {
        out_set(i, x_at(row * p.columns + i % p.columns));
    }
}
