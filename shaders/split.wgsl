// f32 values as three planes of bf16, the low, the middle and the high parts: NUMERICS.md, "Split operands".

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
    let x = x_at(i);
    let high = bf16_round(x);
    let finite = (high & INF) != INF;
    let rest = f32_sub(x, high);
    let middle = bf16_round(rest);
    out_set(i, select(0u, f32_sub(rest, middle), finite));
    out_set(p.elements + i, select(0u, middle, finite));
    out_set(2u * p.elements + i, high);
}
