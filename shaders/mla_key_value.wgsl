// Keys and values of latent attention: each head's key is its own columns and the rotated shared ones. An invocation has
// a column that is copied, or a pair.

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
    // Of a head: the key's own columns, its pairs, then the value's columns.
    let items = p.nope + p.pairs + p.v;
    let item = i % items;
    let head = i / items;
    let token = head / p.heads;
    let joint = head * (p.nope + p.v);
    let key = head * (p.nope + 2u * p.pairs);
    if item < p.nope {
        k_set(key + item, kv_at(joint + item));
    } else if item < p.nope + p.pairs {
        let j = item - p.nope;
        let columns = columns_of(j, p.pairs, p.halves);
        let source = token * 2u * p.pairs + columns;
        var pair = vec2<u32>(k_rope_at(source.x), k_rope_at(source.y));
        let position = positions_at(token);
        if position < p.table_rows {
            let angle = position * p.pairs + j;
            pair = rotate(pair.x, pair.y, cos_at(angle), sin_at(angle), 0u);
        }
        let place = key + p.nope + columns;
        k_set(place.x, pair.x);
        k_set(place.y, pair.y);
    } else {
        let value = item - p.nope - p.pairs;
        v_set(head * p.v + value, kv_at(joint + p.nope + value));
    }
}
