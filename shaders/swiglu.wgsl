// SwiGLU: NUMERICS.md, "Row-wise ops".

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
    if limit_given() && row >= limit_at(0u) {
        return;
    }
    let gate = row * 2u * p.width + i % p.width;
    let g = gate_up_at(gate);
    var value = f32_mul(f32_mul(g, f32_sigmoid(g)), gate_up_at(gate + p.width));
    if weight_given() {
        value = f32_mul(value, weight_at(row));
    }
    out_set(i, value);
}
