// Counting in order, a tile of 64 at a time.

var<workgroup> counted: array<u32, 64>;

// In .x the lanes below this one with the flag, in .y all of them.
fn count_lanes(lane: u32, flag: bool) -> vec2<u32> {
    let own = select(0u, 1u, flag);
    workgroupBarrier();
    counted[lane] = own;
    for (var reach = 1u; reach < 64u; reach <<= 1u) {
        workgroupBarrier();
        var below = 0u;
        if lane >= reach {
            below = counted[lane - reach];
        }
        workgroupBarrier();
        counted[lane] += below;
    }
    workgroupBarrier();
    return vec2<u32>(counted[lane] - own, counted[63]);
}
