// ex2: NUMERICS.md, "ex2 and rcp". The twin of core/src/numerics/special, whose comments explain it.

// Of each segment c0; and c1 less a multiple of 2^15, above c2.
var<private> ex2_segments: array<vec2<u32>, 64> = array(
    vec2(0x0000003u, 0xFF62E5EEu), vec2(0x005934Au, 0xFF66C1F5u), vec2(0x00B361Eu, 0xFF6AA9FAu), vec2(0x010E8A5u, 0xFF6E9DFFu),
    vec2(0x016AB12u, 0xFF729A06u), vec2(0x01C7D89u, 0xFF76A609u), vec2(0x022603Cu, 0xFF7ABA0Fu), vec2(0x0285359u, 0xFF7EDA14u),
    vec2(0x02E570Cu, 0xFF83021Du), vec2(0x0346B81u, 0xFF873A22u), vec2(0x03A90E8u, 0xFF8B7E27u), vec2(0x040C775u, 0xFF8FCA2Fu),
    vec2(0x0470F51u, 0xFF942634u), vec2(0x04D68B0u, 0xFF988E38u), vec2(0x053D3C3u, 0xFF9CFE41u), vec2(0x05A50B9u, 0xFFA17E47u),
    vec2(0x060DFC5u, 0xFFA60A4Du), vec2(0x067811Au, 0xFFAAA254u), vec2(0x06E34E9u, 0xFFAF4A58u), vec2(0x074FB6Au, 0xFFB3FA61u),
    vec2(0x07BD4CCu, 0xFFB8BA67u), vec2(0x082C148u, 0xFFBD866Eu), vec2(0x089C10Eu, 0xFFC26273u), vec2(0x090D459u, 0xFFC74A79u),
    vec2(0x097FB5Du, 0xFFCC3E81u), vec2(0x09F3651u, 0xFFD14287u), vec2(0x0A6856Du, 0xFFD6528Fu), vec2(0x0ADE8EAu, 0xFFDB7295u),
    vec2(0x0B560FEu, 0xFFE09E9Eu), vec2(0x0BCEDE5u, 0xFFE5DAA5u), vec2(0x0C48FDAu, 0xFFEB22AEu), vec2(0x0CC4713u, 0xFFF07EB3u),
    vec2(0x0D413CFu, 0xFFF5E6BBu), vec2(0x0DBF64Bu, 0xFFFB5EC1u), vec2(0x0E3EEC1u, 0x0000E2CBu), vec2(0x0EBFD6Du, 0x00067AD1u),
    vec2(0x0F42291u, 0x000C1EDAu), vec2(0x0FC5E6Au, 0x0011D2E3u), vec2(0x104B137u, 0x001796ECu), vec2(0x10D1B36u, 0x001D6EF1u),
    vec2(0x1159CABu, 0x002352FBu), vec2(0x11E35D6u, 0x00294705u), vec2(0x126E6FAu, 0x002F4F0Bu), vec2(0x12FB057u, 0x00356713u),
    vec2(0x1389233u, 0x003B8F1Cu), vec2(0x1418CD2u, 0x0041C726u), vec2(0x14AA079u, 0x0048132Du), vec2(0x153CD6Du, 0x004E6F36u),
    vec2(0x15D13F7u, 0x0054DB41u), vec2(0x166745Au, 0x005B5B4Au), vec2(0x16FEEE1u, 0x0061EF51u), vec2(0x17983D6u, 0x0068935Au),
    vec2(0x1833380u, 0x006F4766u), vec2(0x18CFE2Au, 0x0076136Du), vec2(0x196E41Fu, 0x007CEF77u), vec2(0x1A0E5ADu, 0x0083DF80u),
    vec2(0x1AB0320u, 0x008ADF8Du), vec2(0x1B53CC4u, 0x0091F795u), vec2(0x1BF92EAu, 0x0099239Du), vec2(0x1CA05E0u, 0x00A05FAAu),
    vec2(0x1D495F8u, 0x00A7B3B2u), vec2(0x1DF4382u, 0x00AF17BFu), vec2(0x1EA0ECFu, 0x00B693C9u), vec2(0x1F4F834u, 0x00BE23D4u),
);

// The truncated square of a number whose upper 8 bits are `high` and whose next 7 are `low`.
fn truncated_square(high: u32, low: u32) -> u32 {
    var sum = (high * high) >> 1u;
    for (var i = 1u; i < 8u; i += 1u) { // unrolled
        sum += (high >> i) * ((low >> (7u - i)) & 1u);
    }
    return sum;
}

// What the coefficients of a segment add to the result's last places; but for the part of the slope that was left out.
fn interpolated(segment: vec2<u32>, constant: u32, x: u32, square: u32) -> u32 {
    let below = ((segment.x & 3u) << 13u) + constant + u32(i32(segment.y) >> 10u) * x + (segment.y & 0x3FFu) * square;
    return (segment.x >> 2u) + u32(i32(below) >> 15u);
}

// 2^a.
fn f32_ex2(a: u32) -> u32 {
    let magnitude = a & MAGNITUDE;
    let negative = (a & SIGN) != 0u;
    // 23 fraction bits; below 2^-23 nothing is left.
    let field = magnitude >> 23u;
    let up = clamp(i32(field) - 127, 0, 6);
    let down = clamp(127 - i32(field), 0, 31);
    let truncated = ((((magnitude & FRACTION) | HIDDEN) << u32(up))) >> u32(down);
    // A negative fraction is the ones' complement.
    let below = select(~truncated, 0u - truncated, (truncated & FRACTION) == 0u);
    let fixed = select(truncated, below, negative);
    let x = fixed & 0x1FFFFu;
    let square = truncated_square(x >> 9u, (x >> 2u) & 0x7Fu);
    let places = interpolated(ex2_segments[(fixed >> 17u) & 63u], 6114u, x, square) + x;
    let ordinary = ONE + (fixed & ~FRACTION) + places;
    let value = select(select(ordinary, INF, magnitude >= 0x43000000u), 0u, magnitude > 0x42FC0000u && negative);
    return select(value, NAN, magnitude > INF);
}
