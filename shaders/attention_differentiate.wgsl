// Probabilities and the gradients of the scores of one tile of keys: NUMERICS.md, "Attention". An invocation has a row of a
// head and a key.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.params;
    let i = linear(group, groups) * 64u + lane;
    if i >= p.elements {
        return;
    }
    let head_of_all = i / (p.rows * p.keys);
    let row = p.first_key + i / p.keys % p.rows;
    let c = i % p.keys;
    let key = p.first_key + c;
    let token = head_of_all / p.heads * p.sequence + row;
    var first = 0u;
    if start_given {
        first = start_at(token);
    }
    let place = head_of_all * p.sequence + row;
    let head = token * p.heads + head_of_all % p.heads;
    let s = f32_mul(scores_at(place * p.keys + c), p.scale);
    let probability = f32_exp(f32_sub(s, lse_at(head)));
    let slope = f32_mul(probability, f32_sub(d_scores_at(place * p.keys + c), delta_at(head)));
    let seen = key >= first && key <= row;
    probabilities_set(place * TILE_KEYS + c, select(0u, probability, seen));
    slopes_set(place * TILE_KEYS + c, select(0u, slope, seen));
}
