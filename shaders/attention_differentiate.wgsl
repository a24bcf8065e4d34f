// Probabilities, and as slopes the gradients of the scores: NUMERICS.md, "Attention", backward, step 1. An
// invocation has a row and a key.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let i = linear(group, groups) * 64u + lane;
    let row = p.row + i % p.width;
    let key = i / p.width % p.keys;
    let pair = i / p.width / p.keys;
    if pair >= p.pairs || key >= to_squares(row + 1u) {
        return;
    }
    var probability = UNSEEN;
    var slope = UNSEEN;
    if first_key(pair, row) <= key && key <= row {
        let query = query_of(pair, row);
        probability = f32_ex2(exponent(scores_at(i), lse_at(query)));
        slope = f32_mul(probability, f32_sub(d_probabilities_at(i), delta_at(query)));
    }
    probabilities_set(i, probability);
    slopes_set(i, slope);
}
