// The sum of the parts along the tree over their index: NUMERICS.md, "Sums".

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
    height = 0u;
    for (var part = 0u; part < p.parts; part += 1u) {
        let depth = select(parting(0u, p.parts, part - 1u, part), 0u, part == 0u);
        push_leaf(parts_at(part * p.elements + i), depth);
    }
    out_set(i, tree_sum());
}
