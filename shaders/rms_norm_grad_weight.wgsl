// The gradient of the weight of RMSNorm, by the token-sum rule: NUMERICS.md, "Row-wise ops". An invocation has a column of
// a group.

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
    let group_of_rows = i / p.columns;
    let column = i % p.columns;
    var total = 0u;
    for (var block = 0u; block < p.group_rows; block += 128u) {
        var sum = 0u;
        for (var n = block; n < min(block + 128u, p.group_rows); n += 1u) {
            let row = group_of_rows * p.group_rows + n;
            let place = row * p.columns + column;
            let term = f32_mul(dy_at(place), f32_mul(x_at(place), rstd_at(row)));
            sum = select(f32_add(sum, term), term, n == block);
        }
        total = select(f32_add(total, sum), sum, block == 0u);
    }
    d_weight_set(i, f32_add(d_weight_at(i), total));
}
