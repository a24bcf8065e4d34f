// The online softmax: NUMERICS.md, "Attention", forward, steps 2 to 4. Turns scores into probabilities, and keeps
// what the product with the values needs of each tile of keys and in the end. An invocation has a row.

const MINUS_INF: u32 = SIGN | INF;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let i = linear(group, groups) * 64u + lane;
    let column = i % p.width;
    let row = p.row + column;
    let pair = i / p.width;
    if pair >= p.pairs || row >= p.sequence {
        return;
    }
    let first = first_key(pair, row);
    let tiles = (p.keys + KEY_TILE - 1u) / KEY_TILE;
    var largest = MINUS_INF;
    var total = 0u;
    for (var begin = 0u; begin <= row; begin += KEY_TILE) {
        let before = largest;
        var highest = MINUS_INF;
        for (var key = max(first, begin); key < min(begin + KEY_TILE, row + 1u); key += 1u) {
            let score = scores_at(score_place(pair, key, row));
            highest = select(highest, score, f32_lt(highest, score));
        }
        highest = f32_mul(highest, p.scale);
        largest = select(largest, highest, f32_lt(largest, highest));
        // Without a visible key nothing changes.
        let seen = first <= min(begin + KEY_TILE - 1u, row);
        let scaled = select(f32_ex2(f32_sub(before, largest)), 0u, before == MINUS_INF);
        let alpha = select(ONE, scaled, seen);
        alpha_set((pair * tiles + begin / KEY_TILE) * p.width + column, alpha);

        let end = min(begin + KEY_TILE, to_squares(row + 1u));
        var sums: vec4<u32>;
        for (var t = 0u; t < 4u; t += 1u) {
            var sum = 0u;
            for (var two = begin + 2u * t; two < end; two += 8u) {
                for (var key = two; key < two + 2u; key += 1u) {
                    let place = score_place(pair, key, row);
                    var probability = UNSEEN;
                    if first <= key && key <= row {
                        probability = f32_ex2(exponent(scores_at(place), largest));
                        sum = f32_add(sum, probability);
                    }
                    probabilities_set(place, probability);
                }
            }
            sums[t] = sum;
        }
        let sum = f32_add(f32_add(sums.x, sums.y), f32_add(sums.z, sums.w));
        total = f32_add(f32_mul(total, alpha), sum);
    }
    reciprocals_set(i, select(f32_div(ONE, total), 0u, largest == MINUS_INF));
    lse_set(query_of(pair, row), f32_fma(f32_log(total), LOG2_OF_E, largest));
}
