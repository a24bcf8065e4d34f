// Choices of each expert in each sequence, and the sequence-wise auxiliary loss: NUMERICS.md, "Routing". A workgroup has a
// sequence; a lane owns every 32nd expert.
//
// Constants: EXPERTS.

var<workgroup> load: array<u32, EXPERTS>;
var<workgroup> total: array<u32, EXPERTS>;
var<workgroup> block_sum: array<u32, EXPERTS>;

@compute @workgroup_size(32)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let sequence = linear(group, groups);
    if sequence >= p.sequences {
        return;
    }
    let first = sequence * p.tokens;
    var valid = 0u;
    for (var t = 0u; t < p.tokens; t += 1u) {
        valid += select(0u, 1u, is_valid(first + t));
    }
    for (var e = lane; e < EXPERTS; e += 32u) {
        var count = 0u;
        for (var n = 0u; n < p.tokens * p.k; n += 1u) {
            count += select(0u, 1u, ids_at(first * p.k + n) == e);
        }
        counts_set(sequence * EXPERTS + e, count);
        load[e] = expert_load(count, p.k * valid);
        total[e] = 0u;
    }
    for (var block = 0u; block < p.tokens; block += 128u) {
        for (var e = lane; e < EXPERTS; e += 32u) {
            block_sum[e] = 0u;
        }
        for (var t = first + block; t < first + min(block + 128u, p.tokens); t += 1u) {
            if is_valid(t) {
                let sum = sum_of_scores(lane, t);
                for (var e = lane; e < EXPERTS; e += 32u) {
                    let even = f32_div(ONE, f32_from_u32(EXPERTS));
                    let share = select(f32_div(scores_at(t * EXPERTS + e), sum), even, (sum & MAGNITUDE) == 0u);
                    block_sum[e] = f32_add(block_sum[e], share);
                }
            }
        }
        for (var e = lane; e < EXPERTS; e += 32u) {
            total[e] = f32_add(total[e], block_sum[e]);
        }
    }
    workgroupBarrier();
    var part = 0u;
    for (var start = lane * RUN; start < EXPERTS; start += TURN) {
        for (var e = start; e < min(start + RUN, EXPERTS); e += 1u) {
            part = f32_add(part, f32_mul(load[e], f32_div(total[e], f32_from_u32(valid))));
        }
    }
    let loss = f32_mul(p.coefficient, butterfly(lane, part));
    if lane == 0u {
        loss_set(sequence, select(loss, 0u, valid == 0u));
    }
}
