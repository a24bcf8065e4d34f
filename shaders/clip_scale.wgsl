// The gradient norm and the factor that clips it: NUMERICS.md, "Row-wise ops". One invocation adds in order.

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
    var sum = 0u;
    for (var n = 0u; n < p.squares; n += 1u) {
        sum = f32_add(sum, squares_at(n));
    }
    let norm = f32_sqrt(sum);
    let clips = f32_lt(0u, p.max_norm) && f32_lt(p.max_norm, norm);
    let factor = select(ONE, f32_div(p.max_norm, norm), clips);
    out_set(0u, norm);
    out_set(1u, select(factor, norm, is_nan(norm)));
}
