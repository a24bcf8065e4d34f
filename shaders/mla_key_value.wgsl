// Keys and values of latent attention: each head's key is its own columns and the rotated shared ones.

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
    // Columns of a head: nope and rope of the key, then the value.
    let width = p.nope + p.rope + p.v;
    let column = i % width;
    let head = i / width;
    let token = head / p.heads;
    let joint = head * (p.nope + p.v);
    let key = head * (p.nope + p.rope) + column;
    if column < p.nope {
        k_set(key, kv_at(joint + column));
    } else if column < p.nope + p.rope {
        let j = column - p.nope;
        let first = token * p.rope + j - j % 2u;
        var pair = vec2<u32>(k_rope_at(first), k_rope_at(first + 1u));
        let position = positions_at(token);
        if position < p.table_rows {
            let angle = position * (p.rope / 2u) + j / 2u;
            pair = rotate(pair.x, pair.y, cos_at(angle), sin_at(angle), 0u);
        }
        k_set(key, select(pair.x, pair.y, j % 2u == 1u));
    } else {
        let value = column - p.nope - p.rope;
        v_set(head * p.v + value, kv_at(joint + p.nope + value));
    }
}
