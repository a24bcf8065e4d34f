// Row reductions: NUMERICS.md, "Sums". A workgroup of 32 lanes has a row; 8 consecutive elements belong to a lane.

const RUN: u32 = 8u;
const TURN: u32 = 256u;

var<workgroup> lanes: array<u32, 32>;

// The sum of the lanes' values: lane xor 16, 8, 4, 2, 1.
fn butterfly(lane: u32, value: u32) -> u32 {
    workgroupBarrier();
    lanes[lane] = value;
    for (var width = 16u; width > 0u; width >>= 1u) {
        workgroupBarrier();
        if lane < width {
            lanes[lane] = f32_add(lanes[lane], lanes[lane + width]);
        }
    }
    workgroupBarrier();
    return lanes[0];
}

// The larger one; a NaN is ignored if it comes second.
fn larger(a: u32, b: u32) -> u32 {
    return select(a, b, f32_lt(a, b));
}

fn largest_lane(lane: u32, value: u32) -> u32 {
    workgroupBarrier();
    lanes[lane] = value;
    for (var width = 16u; width > 0u; width >>= 1u) {
        workgroupBarrier();
        if lane < width {
            lanes[lane] = larger(lanes[lane], lanes[lane + width]);
        }
    }
    workgroupBarrier();
    return lanes[0];
}
