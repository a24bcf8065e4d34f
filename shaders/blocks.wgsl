// Block formats: NUMERICS.md, "Block formats". The twin of core/src/numerics/blocks.rs.
//
// Constants: FORMAT and OPTION (MXFP8: round the exponent down; FP8 blocks: keep the f32 scale; NVFP4: stochastic).

const MXFP8: u32 = 0u;
const FP8_BLOCK: u32 = 1u;
const NVFP4: u32 = 2u;
const LARGEST: u32 = 0x7F7FFFFFu;

// The bits of |a|, which order as the values do; 0 for NaN, which an amax ignores.
fn magnitude_of(a: u32) -> u32 {
    return select(a & MAGNITUDE, 0u, is_nan(a));
}

// What is stored for a block, and the factor that brings its values into the range of the codes.
struct Scale {
    stored: u32,
    factor: u32,
}

fn mxfp8_scale(amax: u32) -> Scale {
    // 1/448, or 1/256: the largest value, or the largest power of two.
    let up = ue8m0_from_f32(f32_mul(amax, 0x3B124925u));
    let down = ue8m0_from_f32_floor(f32_mul(amax, 0x3B800000u));
    let stored = select(up, down, OPTION == 1u);
    return Scale(stored, ue8m0_reciprocal(stored));
}

fn fp8_scale(amax: u32) -> Scale {
    let usable = amax > 0u && amax < INF;
    let exact = select(ONE, min(f32_div(0x43E00000u, amax), LARGEST), usable);
    let factor = select(exact & 0xFF800000u, exact, OPTION == 1u);
    return Scale(f32_div(ONE, factor), factor);
}

// `whole`: the amax of the tensor.
fn nvfp4_scale(amax: u32, whole: u32) -> Scale {
    let usable = whole > 0u && whole < INF;
    let encode = select(ONE, min(f32_div(0x45280000u, whole), LARGEST), usable);
    let stored = e4m3_from_f32(min(f32_mul(amax, f32_mul(encode, 0x3E2AAAABu)), LARGEST));
    let decoded = f32_mul(e4m3_to_f32(stored), f32_div(ONE, encode));
    return Scale(stored, select(min(f32_div(ONE, decoded), LARGEST), 0u, stored == 0u));
}
