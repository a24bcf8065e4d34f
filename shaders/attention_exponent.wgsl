// The exponents of probabilities: NUMERICS.md, "Attention".

// Of a score relative to `start`. Both sides of the choice would cost a third more.
fn exponent(score: u32, start: u32) -> u32 {
    let factor = given.scalars.scale;
    // 2^24
    if f32_abs(start) < 0x4B800000u {
        return f32_fma(score, factor, f32_neg(start));
    }
    return f32_sub(f32_mul(score, factor), start);
}
