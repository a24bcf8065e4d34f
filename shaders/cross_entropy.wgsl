// Cross-entropy and its gradient: NUMERICS.md, "Row-wise ops". A workgroup has a token. A target
// outside the vocabulary is none.

@compute @workgroup_size(32)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let row = linear(group, groups);
    if row >= p.rows {
        return;
    }
    let target_id = targets_at(row);
    let base = row * p.columns;
    if target_id >= p.columns {
        if lane == 0u {
            loss_set(row, 0u);
        }
        if d_logits_given() {
            for (var i = lane; i < p.columns; i += 32u) {
                d_logits_set(base + i, 0u);
            }
        }
        return;
    }
    var highest = SIGN | INF;
    for (var i = lane; i < p.columns; i += 32u) {
        highest = larger(highest, logits_at(base + i));
    }
    let top = largest_lane(lane, highest);
    // The exponentials are needed for their sum and again for the gradient. Both times are one loop, as a compiler
    // takes its time over each exponential in the text.
    var sum = 0u;
    var total = 0u;
    let factor = scale_at(0u);
    for (var time = 0u; time < select(1u, 2u, d_logits_given()); time += 1u) {
        for (var start = lane * RUN; start < p.columns; start += TURN) {
            for (var i = start; i < min(start + RUN, p.columns); i += 1u) {
                let part = f32_exp(f32_sub(logits_at(base + i), top));
                if time == 0u {
                    sum = f32_add(sum, part);
                } else {
                    let share = f32_div(part, total);
                    let slope = select(share, f32_sub(share, ONE), i == target_id);
                    d_logits_set(base + i, f32_mul(slope, factor));
                }
            }
        }
        if time == 0u {
            total = butterfly(lane, sum);
        }
    }
    if lane == 0u {
        loss_set(row, f32_sub(f32_log(total), f32_sub(logits_at(base + target_id), top)));
    }
}
