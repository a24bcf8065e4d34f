//! The element types of weights in files, to and from f32.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use safetensors::Dtype;

/// The types of unquantized weights.
pub(super) const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];

/// Bytes of an element of a type that has whole ones.
pub(super) fn size(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// The values of little-endian elements, exactly; None for types that hold no weights.
pub(super) fn decode(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    let mut out = Vec::new();
    append(dtype, bytes, &mut out).then_some(out)
}

/// Appends the values of little-endian elements, exactly; false for types that hold no weights. Takes no memory where
/// `out` has room.
pub(super) fn append(dtype: Dtype, bytes: &[u8], out: &mut Vec<f32>) -> bool {
    /// Halves that are converted together.
    const BLOCK: usize = 1 << 12;
    let words = |block: &'_ [u8]| block.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect::<Vec<u16>>();
    let mut halves = |convert: fn(&[u16], &mut [f32])| {
        for block in bytes.chunks(2 * BLOCK) {
            let from = out.len();
            out.resize(from + block.len() / 2, 0.0);
            convert(&words(block), &mut out[from..]);
        }
    };
    match dtype {
        Dtype::F32 => out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        Dtype::BF16 => halves(|words, out| words.reinterpret_cast::<bf16>().convert_to_f32_slice(out)),
        Dtype::F16 => halves(|words, out| words.reinterpret_cast::<f16>().convert_to_f32_slice(out)),
        _ => return false,
    }
    true
}

/// Elements of one of [`FLOATS`], little endian, to nearest with ties to even.
pub(super) fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}
