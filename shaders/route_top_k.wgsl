// Scores and the choice of k experts: NUMERICS.md, "Routing". A lane has a token.
//
// Constants: EXPERTS, GROUPS; SOFTMAX (0: sigmoid).

var<private> score: array<u32, EXPERTS>;
var<private> order: array<u32, EXPERTS>;
var<private> chosen: array<u32, EXPERTS>;
var<private> group_order: array<u32, GROUPS>;
var<private> candidate: array<bool, GROUPS>;
var<private> lanes: array<u32, 32>;

const RUN: u32 = 8u;

// An integer that orders as the values do: the larger, the better. NaN is 0, and both zeros are one.
fn order_of(value: u32) -> u32 {
    let bits = select(value, 0u, value == SIGN);
    return select(select(bits | SIGN, ~bits, (bits & SIGN) != 0u), 0u, is_nan(value));
}

fn value_of(order: u32) -> u32 {
    return select(select(~order, order ^ SIGN, (order & SIGN) != 0u), NAN, order == 0u);
}

// Value descending, then index ascending.
fn comes_before(a_order: u32, a: u32, b_order: u32, b: u32) -> bool {
    return a_order > b_order || (a_order == b_order && a < b);
}

// The softmax of a token's logits; the sum is a row reduction, whose 32 lanes are taken one after the other.
fn softmax(base: u32) {
    var top = SIGN | INF;
    for (var e = 0u; e < EXPERTS; e += 1u) {
        top = f32_max(top, logits_at(base + e));
    }
    for (var l = 0u; l < 32u; l += 1u) {
        lanes[l] = 0u;
    }
    for (var e = 0u; e < EXPERTS; e += 1u) {
        let l = (e / RUN) % 32u;
        score[e] = f32_ex2(f32_mul(f32_sub(logits_at(base + e), top), LOG2_OF_E));
        lanes[l] = f32_add(lanes[l], score[e]);
    }
    for (var width = 16u; width > 0u; width >>= 1u) {
        for (var l = 0u; l < width; l += 1u) {
            lanes[l] = f32_add(lanes[l], lanes[l + width]);
        }
    }
    for (var e = 0u; e < EXPERTS; e += 1u) {
        score[e] = f32_div(score[e], lanes[0]);
    }
}

@compute @workgroup_size(32)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let token = linear(group, groups) * 32u + lane;
    if token >= p.tokens {
        return;
    }
    let base = token * EXPERTS;
    if SOFTMAX == 1u {
        softmax(base);
    } else {
        for (var e = 0u; e < EXPERTS; e += 1u) {
            score[e] = f32_sigmoid(logits_at(base + e));
        }
    }
    for (var e = 0u; e < EXPERTS; e += 1u) {
        scores_set(base + e, score[e]);
        var value = score[e];
        if bias_given() {
            value = f32_add(value, bias_at(e));
        }
        order[e] = order_of(value);
    }
    if valid_given() && valid_at(token) == 0u {
        for (var n = 0u; n < p.k; n += 1u) {
            ids_set(token * p.k + n, 0xFFFFFFFFu);
            weights_set(token * p.k + n, 0u);
        }
        return;
    }

    // The order of each group's value, and how many groups come before it.
    let size = EXPERTS / GROUPS;
    for (var g = 0u; g < GROUPS; g += 1u) {
        var first = 0u;
        var second = 0u;
        for (var e = g * size; e < (g + 1u) * size; e += 1u) {
            let lower = min(first, order[e]);
            first = max(first, order[e]);
            second = max(second, lower);
        }
        let alone = SOFTMAX == 1u || size == 1u;
        group_order[g] = order_of(select(f32_add(value_of(first), value_of(second)), value_of(first), alone));
    }
    for (var g = 0u; g < GROUPS; g += 1u) {
        var before = 0u;
        for (var other = 0u; other < GROUPS; other += 1u) {
            before += select(0u, 1u, comes_before(group_order[other], other, group_order[g], g));
        }
        candidate[g] = before < p.top_groups;
    }

    // Each choice is the best candidate after the one before.
    var sum = 0u;
    var last = 0xFFFFFFFFu;
    var last_order = 0xFFFFFFFFu;
    for (var n = 0u; n < p.k; n += 1u) {
        var best = 0xFFFFFFFFu;
        var best_order = 0u;
        for (var e = 0u; e < EXPERTS; e += 1u) {
            let later = n == 0u || comes_before(last_order, last, order[e], e);
            if candidate[e / size] && later && comes_before(order[e], e, best_order, best) {
                best = e;
                best_order = order[e];
            }
        }
        ids_set(token * p.k + n, best);
        let already = counts_count(best, 1u);
        sum = f32_add(sum, score[best]);
        last = best;
        last_order = best_order;
        chosen[n] = score[best];
    }
    let divisor = select(ONE, f32_add(sum, p.guard), p.normalize == 1u);
    for (var n = 0u; n < p.k; n += 1u) {
        weights_set(token * p.k + n, f32_mul(p.scale, f32_div(chosen[n], divisor)));
    }
}
