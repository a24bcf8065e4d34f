// What was accumulated, divided by the sum, and the log-sum-exp: NUMERICS.md, "Attention". An invocation has an element of
// the result.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.params;
    let i = linear(group, groups) * 64u + lane;
    if i >= p.elements {
        return;
    }
    let width = p.heads * p.dim;
    let token = i / width;
    let head = i % width / p.dim;
    let place = (token / p.sequence * p.heads + head) * p.sequence + token % p.sequence;
    let sum = total_at(place);
    let value = f32_div(sums_at(place * p.dim + i % p.dim), sum);
    out_set(i, select(value, 0u, (sum & MAGNITUDE) == 0u));
    if i % p.dim == 0u {
        lse_set(token * p.heads + head, f32_add(largest_at(place), f32_log(sum)));
    }
}
