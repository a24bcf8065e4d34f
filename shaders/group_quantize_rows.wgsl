// Blocks along the rows: NUMERICS.md, "Block formats". An invocation has a block.
//
// Constants: BLOCK and those of blocks.wgsl.

// Rounds |a| up with probability `random` / 256 of the way.
fn e2m1_stochastic(a: u32, random: u32) -> u32 {
    let capped = min(a & MAGNITUDE, 0x40C00000u);
    let spacing = select(select(0x40000000u, ONE, capped < 0x40800000u), 0x3F000000u, capped < 0x40000000u);
    let moved = f32_fma(f32_mul(f32_from_u32(random), 0x3B800000u), spacing, capped);
    var values = array<u32, 7>(
        0x3F000000u, 0x3F800000u, 0x3FC00000u, 0x40000000u, 0x40400000u, 0x40800000u, 0x40C00000u,
    );
    var code = 0u;
    for (var n = 0u; n < 7u; n += 1u) {
        code += select(0u, 1u, moved >= values[n]);
    }
    return select(code | ((a >> 28u) & 8u), 7u, is_nan(a));
}

// 16 codes, two in a byte. Each has a byte of the block's random words.
fn encode_e2m1(first: u32, factor: u32, block: u32) {
    let p = given.scalars;
    var random = philox4x32(vec2<u32>(p.key_low, p.key_high), vec4<u32>(block, 0u, p.stream, 0u));
    for (var byte = 0u; byte < 8u; byte += 1u) {
        var code = 0u;
        for (var half = 0u; half < 2u; half += 1u) {
            let n = byte * 2u + half;
            let x = f32_mul(x_at(first + n), factor);
            let bits = (random[n / 4u] >> ((n % 4u) * 8u)) & 0xFFu;
            let one = select(e2m1_from_f32(x), e2m1_stochastic(x, bits), OPTION == 1u);
            code |= one << (half * 4u);
        }
        codes_set(first / 2u + byte, code);
    }
}

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
    let row = i / p.row_blocks;
    let block = i % p.row_blocks;
    if offsets_given() && row >= offsets_at(p.groups) {
        return;
    }
    let begin = block * BLOCK;
    let end = min(begin + BLOCK, p.columns);
    var amax = 0u;
    if squares_given() {
        let down = row / p.group_rows * p.grid_rows + row % p.group_rows / BLOCK;
        amax = squares_at(down * p.row_blocks + block);
    } else {
        for (var column = begin; column < end; column += 1u) {
            amax = max(amax, magnitude_of(x_at(row * p.columns + column)));
        }
    }
    if FORMAT == NVFP4 {
        let scale = nvfp4_scale(amax, whole_at(0u));
        encode_e2m1(row * p.columns + begin, scale.factor, i);
        scales_set(i, scale.stored);
    } else {
        var scale = fp8_scale(amax);
        if FORMAT == MXFP8 {
            scale = mxfp8_scale(amax);
        }
        for (var column = begin; column < end; column += 1u) {
            let place = row * p.columns + column;
            codes_set(place, e4m3_from_f32(f32_mul(x_at(place), scale.factor)));
        }
        scales_set(i, scale.stored);
    }
}
