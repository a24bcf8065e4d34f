// a + b, or (a + b) + c: NUMERICS.md, "Row-wise ops".

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
    var sum = f32_add(a_at(i), b_at(i));
    if c_given() {
        sum = f32_add(sum, c_at(i));
    }
    out_set(i, sum);
}
