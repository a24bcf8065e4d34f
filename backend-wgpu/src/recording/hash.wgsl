// The hash of what an op wrote, in parts: docs/recording.md, "Hash". A workgroup has one part, as far as the range of words that
// is bound reaches into it, and adds its sums to those of the ranges before.

struct Range {
    // The first word of the range in the binding, and how many there are.
    first: u32,
    words: u32,
    // The number of the first word among all that the op wrote.
    number: u32,
    // Words of a part.
    part: u32,
    // Where the op's sums begin, in pairs.
    sums: u32,
}

@group(0) @binding(0) var<storage, read> written: array<u32>;
@group(0) @binding(1) var<storage, read_write> sums: array<u32>;
@group(0) @binding(2) var<uniform> range: Range;

var<workgroup> lanes: array<vec2<u32>, 256>;

fn mix(bits: u32) -> u32 {
    var x = bits;
    x = (x ^ (x >> 16u)) * 0x7FEB352Du;
    x = (x ^ (x >> 15u)) * 0x846CA68Bu;
    return x ^ (x >> 16u);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let start = max(group.x * range.part, range.number);
    let end = min((group.x + 1u) * range.part, range.number + range.words);
    var sum = vec2<u32>();
    for (var i = start + lane; i < end; i += 256u) {
        let word = written[range.first + i - range.number];
        let place = i * 0x9E3779B1u;
        sum += vec2<u32>(mix(word ^ (place + 0x243F6A88u)), mix(word ^ (place + 0x85A308D3u)));
    }
    lanes[lane] = sum;
    workgroupBarrier();
    for (var others = 128u; others > 0u; others >>= 1u) {
        if lane < others {
            lanes[lane] += lanes[lane + others];
        }
        workgroupBarrier();
    }
    if lane == 0u {
        let at = (range.sums + group.x) * 2u;
        sums[at] += lanes[0].x;
        sums[at + 1u] += lanes[0].y;
    }
}
