// The number of tokens of each sequence that are none of the padding.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let sequence = linear(group, groups);
    if sequence >= p.sequences {
        return;
    }
    if lane != 0u {
        return;
    }
    var valid = 0u;
    for (var t = 0u; t < p.tokens; t += 1u) {
        var found = false;
        for (var n = 0u; n < p.k; n += 1u) {
            found = found || ids_at((sequence * p.tokens + t) * p.k + n) < p.experts;
        }
        valid += select(0u, 1u, found);
    }
    out_set(sequence, valid);
}
