//! The element types of weights in files, to and from f32.

use half::slice::HalfFloatSliceExt;
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
    let words = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    let mut out = Vec::new();
    match dtype {
        Dtype::F32 => out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        Dtype::BF16 => {
            out.resize(bytes.len() / 2, 0.0);
            words().map(bf16::from_bits).collect::<Vec<_>>().convert_to_f32_slice(&mut out);
        }
        Dtype::F16 => {
            out.resize(bytes.len() / 2, 0.0);
            words().map(f16::from_bits).collect::<Vec<_>>().convert_to_f32_slice(&mut out);
        }
        _ => return None,
    }
    Some(out)
}

/// Elements of one of [`FLOATS`], little endian, to nearest with ties to even.
pub(super) fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}
