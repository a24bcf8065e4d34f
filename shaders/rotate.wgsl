// The pairs of a rotated part of a head, and the rotation of one by an angle, or back: NUMERICS.md, "Row-wise ops". Two
// products and a sum each, no fma.

// Where there is no position, a pair stays as it is.

fn rotate(a: u32, b: u32, cosine: u32, sine: u32, inverse: u32) -> vec2<u32> {
    let s = sine ^ select(0u, SIGN, inverse == 1u);
    return vec2<u32>(f32_sub(f32_mul(a, cosine), f32_mul(b, s)), f32_add(f32_mul(b, cosine), f32_mul(a, s)));
}

// The two columns of pair i of `pairs`: neighbours or, with halves = 1, half of the part apart.
fn columns_of(i: u32, pairs: u32, halves: u32) -> vec2<u32> {
    return select(vec2<u32>(2u * i, 2u * i + 1u), vec2<u32>(i, i + pairs), halves == 1u);
}
