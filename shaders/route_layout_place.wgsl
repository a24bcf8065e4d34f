// The slots of each local expert, in the order of the rows: NUMERICS.md, "Routing". A workgroup has an expert.

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
    var next = offsets_at(expert);
    for (var first = 0u; first < p.choices; first += 64u) {
        let choice = first + lane;
        var here = false;
        if choice < p.choices {
            here = local_expert(choice) == expert;
        }
        let counted = count_lanes(lane, here);
        let slot = next + counted.x;
        // Only ids that repeat in a row could ask for more slots than there are.
        if here && slot < p.slots {
            slot_rows_set(slot, choice / p.k);
            slot_weights_set(slot, weights_at(choice));
            row_slots_set(choice, slot);
        }
        next += counted.y;
    }
}
