// The selection bias after a step: NUMERICS.md, "Routing". Exact, in 64-bit integers.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let i = linear(group, groups) * 64u + lane;
    if i >= p.elements {
        return;
    }
    var count = vec2<u32>(0u);
    var total = vec2<u32>(0u);
    for (var part = 0u; part < p.parts; part += 1u) {
        count = plus(count, counts_at(part * p.elements + i));
        for (var expert = 0u; expert < p.elements; expert += 1u) {
            total = plus(total, counts_at(part * p.elements + expert));
        }
    }
    // Both are at most 2^32 times the number of parts, so the product fits.
    var scaled = product64(count.x, p.elements);
    scaled.y += count.y * p.elements;
    let less = scaled.y < total.y || (scaled.y == total.y && scaled.x < total.x);
    let change = select(p.rate, f32_neg(p.rate), !less);
    let bias = bias_at(i);
    bias_set(i, select(f32_add(bias, change), bias, all(scaled == total)));
}
