// The scores of one tile of keys become probabilities relative to the largest score so far: NUMERICS.md, "Attention". An
// invocation has a row of a head.

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
    // Rows of the sequence before the tile's first key see none of its keys.
    let head_of_all = i / p.rows;
    let row = p.first_key + i % p.rows;
    let place = head_of_all * p.sequence + row;
    var first = p.first_key;
    if start_given {
        first = max(first, start_at(head_of_all / p.heads * p.sequence + row));
    }
    let end = min(row + 1u, p.first_key + p.keys);
    let scores = place * p.keys;
    let old = largest_at(place);

    var top = old;
    for (var key = first; key < end; key += 1u) {
        let s = f32_mul(scores_at(scores + key - p.first_key), p.scale);
        top = select(top, s, f32_lt(top, s));
    }
    let sees = first < end;
    var alpha = ONE;
    if sees {
        alpha = select(f32_exp(f32_sub(old, top)), 0u, old == (SIGN | INF));
    }
    // Lane t adds the columns c with c / 2 mod 4 = t.
    var lanes = vec4<u32>(0u);
    for (var c = 0u; c < p.keys; c += 1u) {
        let key = p.first_key + c;
        var probability = 0u;
        if key >= first && key < end {
            probability = f32_exp(f32_sub(f32_mul(scores_at(scores + c), p.scale), top));
            lanes[c / 2u % 4u] = f32_add(lanes[c / 2u % 4u], probability);
        }
        probabilities_set(place * TILE_KEYS + c, probability);
    }
    let sum = f32_add(f32_add(lanes.x, lanes.y), f32_add(lanes.z, lanes.w));
    if sees {
        total_set(place, f32_add(f32_mul(total_at(place), alpha), sum));
        largest_set(place, top);
    }
    factors_set(place, alpha);
}
