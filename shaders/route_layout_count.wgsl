// Choices of each local expert. A workgroup has an expert.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let expert = linear(group, groups);
    if expert >= p.experts {
        return;
    }
    var count = 0u;
    for (var first = 0u; first < p.choices; first += 64u) {
        let choice = first + lane;
        var here = false;
        if choice < p.choices {
            here = local_expert(choice) == expert;
        }
        count += select(0u, 1u, here);
    }
    let already = totals_count(expert, count);
}
