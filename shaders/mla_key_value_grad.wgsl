// The gradients of the joint keys and values, copied, and of the shared key: the heads added in order, then rotated
// back. An invocation has a column that is copied, or a pair.

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
    // Of a token: the columns of kv, then the pairs of the shared key.
    let joint = p.nope + p.v;
    let items = p.heads * joint + p.pairs;
    let token = i / items;
    let item = i % items;
    let key = p.nope + 2u * p.pairs;
    if item < p.heads * joint {
        let head = token * p.heads + item / joint;
        let inner = item % joint;
        if inner < p.nope {
            d_kv_set(head * joint + inner, d_k_at(head * key + inner));
        } else {
            d_kv_set(head * joint + inner, d_v_at(head * p.v + inner - p.nope));
        }
        return;
    }
    let j = item - p.heads * joint;
    let columns = columns_of(j, p.pairs, p.halves);
    var sum = vec2<u32>(0u);
    for (var head = 0u; head < p.heads; head += 1u) {
        let source = (token * p.heads + head) * key + p.nope + columns;
        let term = vec2<u32>(d_k_at(source.x), d_k_at(source.y));
        sum = select(vec2<u32>(f32_add(sum.x, term.x), f32_add(sum.y, term.y)), term, head == 0u);
    }
    let position = positions_at(token);
    if position < p.table_rows {
        let angle = position * p.pairs + j;
        sum = rotate(sum.x, sum.y, cos_at(angle), sin_at(angle), 1u);
    }
    let place = token * 2u * p.pairs + columns;
    d_k_rope_set(place.x, sum.x);
    d_k_rope_set(place.y, sum.y);
}
