// The gradient of the rows of RMSNorm: NUMERICS.md, "Row-wise ops". A workgroup has a row.

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
            let place = row * p.columns + i;
            sum = f32_add(sum, f32_mul(f32_mul(dy_at(place), weight_at(i)), x_at(place)));
        }
    }
    let c = f32_div(butterfly(lane, sum), f32_from_u32(p.columns));
    let rstd = rstd_at(row);
    let along = f32_mul(f32_mul(rstd, rstd), c);
    for (var i = lane; i < p.columns; i += 32u) {
        let place = row * p.columns + i;
        let scaled = f32_mul(dy_at(place), weight_at(i));
        var dx = f32_mul(rstd, f32_sub(scaled, f32_mul(x_at(place), along)));
        if residual_given() {
            dx = f32_add(dx, residual_at(place));
        }
        dx_set(place, dx);
    }
}
