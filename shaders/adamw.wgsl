// AdamW in place: NUMERICS.md, "Row-wise ops". Numbers that depend on beta alone come rounded from the launcher.

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
    let rate = step_at(0u);
    let g = f32_mul(grad_at(i), clip_at(1u));
    let m = f32_fma(p.beta1, m_at(i), f32_mul(p.rest1, g));
    let v = f32_fma(p.beta2, v_at(i), f32_mul(f32_mul(p.rest2, g), g));
    let root = f32_add(f32_sqrt(f32_div(v, step_at(2u))), p.eps);
    let u = f32_div(f32_div(m, step_at(1u)), root);
    let old = param_at(i);
    let decayed = f32_sub(old, f32_mul(rate, f32_mul(p.decay, old)));
    let new_param = f32_sub(decayed, f32_mul(rate, u));
    m_set(i, m);
    v_set(i, v);
    param_set(i, new_param);
    param_bf16_set(i, new_param);
}
