// The groups' offsets when each is padded to whole blocks. One invocation adds in order.

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
    var offset = 0u;
    var begin = 0u;
    for (var g = 0u; g < p.groups; g += 1u) {
        padded_set(g, offset);
        let end = counted_offset(begin, offsets_at(g + 1u), offsets_at(p.groups), p.rows);
        offset += (end - begin + p.block - 1u) / p.block * p.block;
        begin = end;
    }
    padded_set(p.groups, offset);
}
