// Sums of one head after the other into a tensor [tokens, heads * dim], scaled: NUMERICS.md, "Attention". An invocation has
// an element.

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
    let head_of_all = i / (p.rows * p.dim);
    let row = i / p.dim % p.rows;
    let token = head_of_all / p.heads * p.sequence + p.first_row + row;
    let place = (token * p.heads + head_of_all % p.heads) * p.dim + i % p.dim;
    out_set(place, f32_mul(sums_at((head_of_all * p.sum_rows + row) * p.dim + i % p.dim), p.scale));
}
