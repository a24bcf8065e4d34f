// What the auxiliary loss of routing and its gradient share: NUMERICS.md, "Routing".
//
// Constants: EXPERTS.

// Whether a token is none of the padding: one of its choices is an expert.
fn is_valid(token: u32) -> bool {
    var valid = false;
    for (var n = 0u; n < given.scalars.k; n += 1u) {
        valid = valid || ids_at(token * given.scalars.k + n) < EXPERTS;
    }
    return valid;
}

// The row reduction of a token's scores.
fn sum_of_scores(lane: u32, token: u32) -> u32 {
    var part = 0u;
    for (var start = lane * RUN; start < EXPERTS; start += TURN) {
        for (var e = start; e < min(start + RUN, EXPERTS); e += 1u) {
            part = f32_add(part, scores_at(token * EXPERTS + e));
        }
    }
    return butterfly(lane, part);
}

// f_e of `count` out of `choices`.
fn expert_load(count: u32, choices: u32) -> u32 {
    return f32_div(f32_mul(f32_from_u32(EXPERTS), f32_from_u32(count)), f32_from_u32(choices));
}
