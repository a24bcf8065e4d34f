// Rotary embedding in halves. An invocation has a pair: columns j and j + half of a head.

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
    let pairs = p.columns / 2u;
    let token = i / pairs;
    let head = (i % pairs) / p.half;
    let j = i % p.half;
    let place = token * p.columns + head * 2u * p.half + j;
    var pair = vec2<u32>(x_at(place), x_at(place + p.half));
    let position = positions_at(token);
    if position < p.table_rows {
        let angle = position * p.half + j;
        pair = rotate(pair.x, pair.y, cos_at(angle), sin_at(angle), p.inverse);
    }
    out_set(place, pair.x);
    out_set(place + p.half, pair.y);
}
