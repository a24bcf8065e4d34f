// Which tokens go to which rank: NUMERICS.md, "Routing". A workgroup has a rank and walks the tokens in order.
// An id that is none of the experts belongs to no rank.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let rank = linear(group, groups);
    if rank >= p.ranks {
        return;
    }
    var count = 0u;
    for (var first = 0u; first < p.tokens; first += 64u) {
        let token = first + lane;
        let phase = token % p.window_period;
        var goes = false;
        if token < p.tokens && phase >= p.window_begin && phase < p.window_end {
            for (var n = 0u; n < p.k; n += 1u) {
                let id = ids_at(token * p.k + n);
                goes = goes || id / p.rank_experts == rank;
            }
        }
        let counted = count_lanes(lane, goes);
        let place = rank * p.capacity + count + counted.x;
        if goes {
            rows_set(place, token);
        }
        if token < p.tokens {
            positions_set(token * p.ranks + rank, select(0xFFFFFFFFu, place, goes));
        }
        count += counted.y;
    }
    for (var row = count + lane; row < p.capacity; row += 64u) {
        rows_set(rank * p.capacity + row, 0xFFFFFFFFu);
    }
    if lane == 0u {
        counts_set(rank, count);
    }
}
