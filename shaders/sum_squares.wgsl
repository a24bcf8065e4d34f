// The row reduction of squares: NUMERICS.md, "Sums".

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
    let total = butterfly(lane, sum);
    if lane == 0u {
        out_set(row, total);
    }
}
