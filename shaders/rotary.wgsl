// Rotary embedding: the last columns of each head rotated (or back), those before them (the queries of latent attention
// have such) copied. An invocation has a column that is copied, or a pair.

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
    let items = p.nope + p.pairs;
    let head = i / items;
    let item = i % items;
    let base = head * (p.nope + 2u * p.pairs);
    if item < p.nope {
        out_set(base + item, x_at(base + item));
        return;
    }
    let j = item - p.nope;
    let place = base + p.nope + columns_of(j, p.pairs, p.halves);
    var pair = vec2<u32>(x_at(place.x), x_at(place.y));
    let position = positions_at(head / p.heads);
    if position < p.table_rows {
        let angle = position * p.pairs + j;
        pair = rotate(pair.x, pair.y, cos_at(angle), sin_at(angle), p.inverse);
    }
    out_set(place.x, pair.x);
    out_set(place.y, pair.y);
}
