// Codes of the narrow formats: NUMERICS.md, "Number formats". The twin of core/src/numerics/{bf16,e4m3,ue8m0,e2m1}.rs.

fn bf16_to_f32(code: u32) -> u32 {
    return code << 16u;
}

fn bf16_from_f32(a: u32) -> u32 {
    let rounded = (a + 0x7FFFu + ((a >> 16u) & 1u)) >> 16u;
    return select(rounded, (a >> 16u) | 0x40u, is_nan(a));
}

fn bf16_round(a: u32) -> u32 {
    return bf16_from_f32(a) << 16u;
}

// A magnitude's code in a format with `bits` fraction bits, whose exponent bias is `bias` less than that of f32. The
// magnitude must not lie above the largest finite value.
fn narrow(magnitude: u32, bits: u32, bias: u32) -> u32 {
    let field = magnitude >> 23u;
    let sig = (magnitude & FRACTION) | select(0u, HIDDEN, field != 0u);
    // Below the least normal number, one more bit goes for each power of two.
    let least = bias + 1u;
    let down = min(23u - bits + max(least, field) - field, 31u);
    let rounded = (sig + (1u << (down - 1u)) - 1u + ((sig >> down) & 1u)) >> down;
    // The leading one adds itself to the field.
    return ((max(least, field) - least) << bits) + rounded;
}

// The bits of the magnitude whose code is `code`, under the same description.
fn widen(code: u32, bits: u32, bias: u32) -> u32 {
    let normal = (code << (23u - bits)) + (bias << 23u);
    let lead = countLeadingZeros(code) - (31u - bits);
    let subnormal = ((bias + 1u - lead) << 23u) + ((code << (lead + 23u - bits)) & FRACTION);
    return select(select(normal, subnormal, (code >> bits) == 0u), 0u, code == 0u);
}

fn e4m3_to_f32(code: u32) -> u32 {
    let magnitude = code & 0x7Fu;
    return ((code & 0x80u) << 24u) | select(widen(magnitude, 3u, 120u), NAN, magnitude == 0x7Fu);
}

fn e4m3_from_f32(a: u32) -> u32 {
    let magnitude = a & MAGNITUDE;
    let code = narrow(min(magnitude, 0x43E00000u), 3u, 120u) | ((a >> 24u) & 0x80u);
    return select(code, 0x7Fu, magnitude > INF);
}

fn e2m1_to_f32(code: u32) -> u32 {
    return ((code & 8u) << 28u) | widen(code & 7u, 1u, 126u);
}

fn e2m1_from_f32(a: u32) -> u32 {
    let magnitude = a & MAGNITUDE;
    let code = narrow(min(magnitude, 0x40C00000u), 1u, 126u) | ((a >> 28u) & 8u);
    return select(code, 7u, magnitude > INF);
}

fn ue8m0_to_f32(code: u32) -> u32 {
    return select(select(code << 23u, 0x00400000u, code == 0u), NAN, code == 0xFFu);
}

// 1 over the value of a code, exactly.
fn ue8m0_reciprocal(code: u32) -> u32 {
    return select(ue8m0_to_f32(254u - min(code, 254u)), NAN, code == 0xFFu);
}

// The least power of two that is not below a.
fn ue8m0_from_f32(a: u32) -> u32 {
    let bits = a & MAGNITUDE;
    let remainder = select((bits & FRACTION) != 0u, bits > 0x00400000u, bits < HIDDEN);
    return select(min((bits >> 23u) + select(0u, 1u, remainder), 254u), 0xFFu, bits > INF);
}

// The largest power of two that is not above a.
fn ue8m0_from_f32_floor(a: u32) -> u32 {
    let bits = a & MAGNITUDE;
    return select(min(bits >> 23u, 254u), 0xFFu, bits > INF);
}
