// The groups' offsets from their sizes, none beyond the slots. One invocation adds in order.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let only = linear(group, groups);
    if only >= 1u {
        return;
    }
    if lane == 0u {
        var offset = 0u;
        for (var expert = 0u; expert < p.experts; expert += 1u) {
            offsets_set(expert, min(offset, p.slots));
            offset += totals_at(expert);
        }
        offsets_set(p.experts, min(offset, p.slots));
    }
}
