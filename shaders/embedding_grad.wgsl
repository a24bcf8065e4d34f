// The gradient of an embedding. An invocation has a column of a group's table and walks the group's tokens in order.
// An id outside the vocabulary adds nothing.

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
    let group_of_tokens = i / p.columns;
    let column = i % p.columns;
    for (var n = 0u; n < p.group_tokens; n += 1u) {
        let token = group_of_tokens * p.group_tokens + n;
        let id = ids_at(token);
        if id < p.vocabulary {
            let place = (group_of_tokens * p.vocabulary + id) * p.columns + column;
            d_table_set(place, f32_add(d_table_at(place), dy_at(token * p.columns + column)));
        }
    }
}
