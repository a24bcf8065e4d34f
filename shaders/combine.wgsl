// The sum of each row's slots along the tree over their leaves, then two further terms: NUMERICS.md, "Sums". A slot
// outside of x counts as absent, and so does a leaf outside of the tree.

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
    let row = i / p.columns;
    let column = i % p.columns;
    let token = row % p.window_period;
    if token < p.window_begin || token >= p.window_end {
        return;
    }
    // The leaves in ascending order, equal ones in the order of the choices: each time the least one that is above the last.
    var before = 0u;
    var before_choice = 0u;
    height = 0u;
    for (var n = 0u; n < p.k; n += 1u) {
        var leaf = p.leaf_end;
        var slot = 0u;
        var taken = 0u;
        for (var choice = 0u; choice < p.k; choice += 1u) {
            let place = row * p.k + choice;
            var id = p.leaf_begin + choice;
            if ids_given() {
                id = ids_at(place);
            }
            let later = height == 0u || id > before || (id == before && choice > before_choice);
            if slots_at(place) < p.slots && id >= p.leaf_begin && id < leaf && later {
                leaf = id;
                slot = slots_at(place);
                taken = choice;
            }
        }
        if leaf == p.leaf_end {
            break;
        }
        let depth = select(parting(p.leaf_begin, p.leaf_end, before, leaf), 0u, height == 0u);
        push_leaf(x_at(slot * p.columns + column), depth);
        before = leaf;
        before_choice = taken;
    }
    var sum = tree_sum();
    if first_given() {
        sum = f32_add(sum, first_at(i));
    }
    if second_given() {
        sum = f32_add(sum, second_at(i));
    }
    out_set(i, sum);
}
