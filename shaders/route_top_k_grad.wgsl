// The gradient of the choice of experts: NUMERICS.md, "Routing". A workgroup has a token.
//
// Constants: EXPERTS; SOFTMAX (0: sigmoid).

var<workgroup> d: array<u32, EXPERTS>;
var<workgroup> slope: array<u32, EXPERTS>;

// The gradients of the chosen scores, into d. An id that is none of the experts is no choice.
fn choices(token: u32, base: u32) {
    let p = given.scalars;
    var sum = 0u;
    for (var n = 0u; n < p.k; n += 1u) {
        let e = ids_at(token * p.k + n);
        if e < EXPERTS {
            sum = f32_add(sum, scores_at(base + e));
        }
    }
    let divisor = f32_add(sum, p.guard);
    var dot = 0u;
    for (var n = 0u; n < p.k; n += 1u) {
        let e = ids_at(token * p.k + n);
        if e < EXPERTS {
            let dr = f32_mul(p.scale, d_weights_at(token * p.k + n));
            dot = f32_add(dot, f32_mul(dr, f32_div(scores_at(base + e), divisor)));
        }
    }
    for (var n = 0u; n < p.k; n += 1u) {
        let e = ids_at(token * p.k + n);
        if e < EXPERTS {
            let dr = f32_mul(p.scale, d_weights_at(token * p.k + n));
            d[e] = select(dr, f32_div(f32_sub(dr, dot), divisor), p.normalize == 1u);
        }
    }
}

@compute @workgroup_size(32)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let token = linear(group, groups);
    if token >= p.tokens {
        return;
    }
    let base = token * EXPERTS;
    if !is_valid(token) {
        for (var e = lane; e < EXPERTS; e += 32u) {
            d_logits_set(base + e, 0u);
        }
        return;
    }
    for (var e = lane; e < EXPERTS; e += 32u) {
        d[e] = 0u;
    }
    workgroupBarrier();
    if lane == 0u {
        choices(token, base);
    }
    workgroupBarrier();

    if counts_given() {
        let sequence = token / p.sequence;
        let valid = valid_at(sequence);
        let sum = sum_of_scores(lane, token);
        var part = 0u;
        for (var start = lane * RUN; start < EXPERTS; start += TURN) {
            for (var e = start; e < min(start + RUN, EXPERTS); e += 1u) {
                let load = expert_load(counts_at(sequence * EXPERTS + e), p.k * valid);
                slope[e] = f32_div(f32_mul(p.coefficient, load), f32_from_u32(valid));
                part = f32_add(part, f32_mul(slope[e], f32_div(scores_at(base + e), sum)));
            }
        }
        let dot = butterfly(lane, part);
        for (var e = lane; e < EXPERTS; e += 32u) {
            if (sum & MAGNITUDE) != 0u {
                d[e] = f32_add(d[e], f32_div(f32_sub(slope[e], dot), sum));
            }
        }
        workgroupBarrier();
    }

    if SOFTMAX == 1u {
        var part = 0u;
        for (var start = lane * RUN; start < EXPERTS; start += TURN) {
            for (var e = start; e < min(start + RUN, EXPERTS); e += 1u) {
                part = f32_add(part, f32_mul(d[e], scores_at(base + e)));
            }
        }
        let dot = butterfly(lane, part);
        for (var e = lane; e < EXPERTS; e += 32u) {
            d_logits_set(base + e, f32_mul(scores_at(base + e), f32_sub(d[e], dot)));
        }
    } else {
        for (var e = lane; e < EXPERTS; e += 32u) {
            let s = scores_at(base + e);
            d_logits_set(base + e, f32_mul(d[e], f32_mul(s, f32_sub(ONE, s))));
        }
    }
}
