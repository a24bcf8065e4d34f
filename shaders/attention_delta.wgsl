// delta, the row reduction of d_out * out: NUMERICS.md, "Attention", backward. A workgroup has a head of a row.

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
            sum = f32_add(sum, f32_mul(d_out_at(place), out_at(place)));
        }
    }
    let delta = butterfly(lane, sum);
    if lane == 0u {
        delta_set(row, delta);
    }
}
