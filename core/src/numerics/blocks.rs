//! The block formats: from the amax of a block to its scale, from its values to codes. NUMERICS.md, "Block formats".

use super::philox::philox4x32;
use super::{e2m1, e4m3, ue8m0};

/// The bits of |x|, which order as the values do; 0 for NaN, which an amax ignores.
#[inline(always)]
pub const fn magnitude(x: f32) -> u32 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    if bits > f32::INFINITY.to_bits() { 0 } else { bits }
}

/// The largest |x|; NaN is ignored, and no value gives 0. Lanes only because the compiler does not find them by itself.
#[inline(always)]
pub fn amax(values: &[f32]) -> f32 {
    let mut lanes = [0; 16];
    let (chunks, rest) = values.as_chunks::<16>();
    for values in chunks.iter().map(|c| &c[..]).chain([rest]) {
        for (lane, &x) in lanes.iter_mut().zip(values) {
            *lane = magnitude(x).max(*lane);
        }
    }
    f32::from_bits(lanes.into_iter().fold(0, u32::max))
}

/// A format of blocks that share a scale.
pub trait Format: Sync {
    /// What is stored for a block.
    type Scale: bytemuck::Pod + Send + Sync;
    /// Elements along a block.
    const BLOCK: usize;
    /// Codes in a byte.
    const PER_BYTE: usize;

    /// The stored scale of a block with this amax, and the factor that brings its values into the range of the codes.
    fn scale(&self, amax: f32) -> (Self::Scale, f32);

    /// Writes the codes of `values * factor`. `block` is the block's place in the tensor, counted along its rows; only
    /// stochastic rounding looks at it.
    fn encode(&self, values: &[f32], factor: f32, block: u64, codes: &mut [u8]);
}

#[inline(always)]
fn encode_e4m3(values: &[f32], factor: f32, codes: &mut [u8]) {
    for (code, &x) in codes.iter_mut().zip(values) {
        *code = e4m3::from_f32(x * factor);
    }
}

/// MXFP8: 32 e4m3 codes with a ue8m0 scale.
#[derive(Clone, Copy, Debug)]
pub struct Mxfp8 {
    /// Round the exponent down (the OCP rule), so that the largest elements may saturate.
    pub floor: bool,
}

impl Format for Mxfp8 {
    type Scale = u8;
    const BLOCK: usize = 32;
    const PER_BYTE: usize = 1;

    #[inline(always)]
    fn scale(&self, amax: f32) -> (u8, f32) {
        // The largest power of two in e4m3 is 2^8.
        let scale = if self.floor {
            ue8m0::from_f32_floor(amax * (1.0 / 256.0))
        } else {
            ue8m0::from_f32(amax * (1.0 / e4m3::MAX))
        };
        (scale, ue8m0::reciprocal(scale))
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], factor: f32, _block: u64, codes: &mut [u8]) {
        encode_e4m3(values, factor, codes);
    }
}

/// FP8 blocks: 128 (or 128x128) e4m3 codes with an f32 inverse scale.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Block {
    /// Keep the scale instead of rounding it down to a power of two.
    pub f32_scale: bool,
}

impl Format for Fp8Block {
    type Scale = f32;
    const BLOCK: usize = 128;
    const PER_BYTE: usize = 1;

    #[inline(always)]
    fn scale(&self, amax: f32) -> (f32, f32) {
        let quotient = (e4m3::MAX / amax).min(f32::MAX);
        let usable = amax > 0.0 && amax < f32::INFINITY;
        let scale = if usable { quotient } else { 1.0 };
        let scale = if self.f32_scale { scale } else { f32::from_bits(scale.to_bits() & 0xFF80_0000) };
        (1.0 / scale, scale)
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], factor: f32, _block: u64, codes: &mut [u8]) {
        encode_e4m3(values, factor, codes);
    }
}

/// NVFP4: 16 e2m1 codes with an e4m3 scale, under one scale for the tensor that follows from its amax.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4 {
    encode: f32,
    decode: f32,
    stochastic: Option<(u64, u32)>,
}

/// The largest value of a code times the largest scale.
const NVFP4_MAX: f32 = e2m1::MAX * e4m3::MAX;

impl Nvfp4 {
    /// For a tensor with this amax; with `stochastic` rounding by this Philox key and counter stream, or to nearest
    /// even.
    pub fn new(amax: f32, stochastic: Option<(u64, u32)>) -> Nvfp4 {
        let usable = amax > 0.0 && amax < f32::INFINITY;
        let encode = if usable { (NVFP4_MAX / amax).min(f32::MAX) } else { 1.0 };
        Nvfp4 { encode, decode: 1.0 / encode, stochastic }
    }

    /// What a code times its block's scale is multiplied by: amax / 2688, and 1 where amax is 0 or infinite.
    pub fn tensor_scale(amax: f32) -> f32 {
        if amax > 0.0 && amax < f32::INFINITY { amax / NVFP4_MAX } else { 1.0 }
    }
}

impl Format for Nvfp4 {
    type Scale = u8;
    const BLOCK: usize = 16;
    const PER_BYTE: usize = 2;

    #[inline(always)]
    fn scale(&self, amax: f32) -> (u8, f32) {
        let scale = e4m3::from_f32((amax * (self.encode * (1.0 / e2m1::MAX))).min(f32::MAX));
        let factor = (1.0 / (e4m3::to_f32(scale) * self.decode)).min(f32::MAX);
        // Under a scale of zero every code decodes to zero; zero codes say so.
        (scale, if scale == 0 { 0.0 } else { factor })
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], factor: f32, block: u64, codes: &mut [u8]) {
        let mut random = [[0; 4]; 4];
        if let Some((key, stream)) = self.stochastic {
            random = philox4x32(words(key), [words(block)[0], words(block)[1], stream, 0]).map(u32::to_le_bytes);
        }
        let code = |i: usize| {
            let x = values[i] * factor;
            match self.stochastic {
                None => e2m1::from_f32(x),
                Some(_) => e2m1::from_f32_stochastic(x, random[i / 4][i % 4]),
            }
        };
        for (i, byte) in codes.iter_mut().enumerate() {
            *byte = code(2 * i) | code(2 * i + 1) << 4;
        }
    }
}

/// The lower and the upper word.
#[inline(always)]
const fn words(x: u64) -> [u32; 2] {
    [(x & 0xFFFF_FFFF) as u32, (x >> 32) as u32]
}
