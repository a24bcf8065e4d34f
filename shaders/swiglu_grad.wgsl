// The gradients of SwiGLU: NUMERICS.md, "Row-wise ops". A workgroup has a row.

@compute @workgroup_size(32)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let row = linear(group, groups);
    if row >= p.rows {
        return;
    }
    if limit_given() && row >= limit_at(0u) {
        return;
    }
    var sum = 0u;
    for (var start = lane * RUN; start < p.width; start += TURN) {
        for (var i = start; i < min(start + RUN, p.width); i += 1u) {
            let gate = row * 2u * p.width + i;
            let g = gate_up_at(gate);
            let u = gate_up_at(gate + p.width);
            let one_plus = f32_add(ONE, f32_exp(f32_neg(g)));
            let s = f32_div(ONE, one_plus);
            let h = f32_div(g, one_plus);
            let d_out = d_out_at(row * p.width + i);
            sum = f32_add(sum, f32_mul(d_out, f32_mul(h, u)));
            var d = d_out;
            if weight_given() {
                d = f32_mul(d, weight_at(row));
            }
            let slope = f32_mul(s, f32_add(ONE, f32_mul(g, f32_sub(ONE, s))));
            d_gate_up_set(gate, f32_mul(f32_mul(d, u), slope));
            d_gate_up_set(gate + p.width, f32_mul(d, h));
        }
    }
    if d_weight_given() {
        let total = butterfly(lane, sum);
        if lane == 0u {
            d_weight_set(row, total);
        }
    }
}
