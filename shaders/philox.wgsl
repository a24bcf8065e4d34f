// Philox4x32-10: the twin of core/src/numerics/philox.rs.

fn philox4x32(key: vec2<u32>, counter: vec4<u32>) -> vec4<u32> {
    var k = key;
    var c = counter;
    for (var round = 0u; round < 10u; round += 1u) {
        let first = product64(0xD2511F53u, c.x);
        let second = product64(0xCD9E8D57u, c.z);
        c = vec4<u32>(second.y ^ c.y ^ k.x, second.x, first.y ^ c.w ^ k.y, first.x);
        k += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}
