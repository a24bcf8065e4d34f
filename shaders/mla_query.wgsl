// The queries of latent attention: the rotary columns of each head rotated in neighbouring pairs (or back), the others
// copied.

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
    let width = p.nope + p.rope;
    let column = i % width;
    let position = positions_at(i / (p.heads * width));
    if column < p.nope || position >= p.table_rows {
        out_set(i, x_at(i));
        return;
    }
    let j = column - p.nope;
    let first = i - j % 2u;
    let angle = position * (p.rope / 2u) + j / 2u;
    let pair = rotate(x_at(first), x_at(first + 1u), cos_at(angle), sin_at(angle), p.inverse);
    out_set(i, select(pair.x, pair.y, j % 2u == 1u));
}
