// The gradients of the joint keys and values, copied, and of the shared key: the heads added in order, then rotated back.

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
    // Columns of a token: those of kv, then the shared key.
    let joint = p.nope + p.v;
    let width = p.heads * joint + p.rope;
    let token = i / width;
    let column = i % width;
    let key = p.nope + p.rope;
    if column < p.heads * joint {
        let head = token * p.heads + column / joint;
        let inner = column % joint;
        if inner < p.nope {
            d_kv_set(head * joint + inner, d_k_at(head * key + inner));
        } else {
            d_kv_set(head * joint + inner, d_v_at(head * p.v + inner - p.nope));
        }
        return;
    }
    let j = column - p.heads * joint;
    let first = j - j % 2u;
    var sum = vec2<u32>(0u);
    for (var head = 0u; head < p.heads; head += 1u) {
        let place = (token * p.heads + head) * key + p.nope + first;
        let term = vec2<u32>(d_k_at(place), d_k_at(place + 1u));
        sum = select(vec2<u32>(f32_add(sum.x, term.x), f32_add(sum.y, term.y)), term, head == 0u);
    }
    let position = positions_at(token);
    if position < p.table_rows {
        let angle = position * (p.rope / 2u) + j / 2u;
        sum = rotate(sum.x, sum.y, cos_at(angle), sin_at(angle), 1u);
    }
    d_k_rope_set(token * p.rope + j, select(sum.x, sum.y, j % 2u == 1u));
}
