// RMSNorm: NUMERICS.md, "Row-wise ops". A workgroup has a row.

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
    var sum = 0u;
    for (var start = lane * RUN; start < p.columns; start += TURN) {
        for (var i = start; i < min(start + RUN, p.columns); i += 1u) {
            let x = x_at(row * p.columns + i);
            sum = f32_add(sum, f32_mul(x, x));
        }
    }
    let mean = f32_div(butterfly(lane, sum), f32_from_u32(p.columns));
    let rstd = f32_div(ONE, f32_sqrt(f32_add(mean, p.eps)));
    if lane == 0u {
        rstd_set(row, rstd);
    }
    for (var i = lane; i < p.columns; i += 32u) {
        let place = row * p.columns + i;
        out_set(place, f32_mul(f32_mul(x_at(place), rstd), weight_at(i)));
    }
}
