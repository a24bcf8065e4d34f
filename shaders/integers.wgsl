// 64-bit integers: .x is the low word.

fn plus(a: vec2<u32>, b: u32) -> vec2<u32> {
    let low = a.x + b;
    return vec2<u32>(low, a.y + select(0u, 1u, low < b));
}

fn product64(a: u32, b: u32) -> vec2<u32> {
    let low = (a & 0xFFFFu) * (b & 0xFFFFu);
    let first = (a >> 16u) * (b & 0xFFFFu) + (low >> 16u);
    let second = (a & 0xFFFFu) * (b >> 16u) + (first & 0xFFFFu);
    return vec2<u32>((second << 16u) | (low & 0xFFFFu), (a >> 16u) * (b >> 16u) + (first >> 16u) + (second >> 16u));
}
