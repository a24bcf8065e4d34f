//! Values of block formats in f32, for tests and for checkpoints that hold quantized weights. NUMERICS.md, "Block
//! formats".

use super::blocks::Nvfp4;
use super::{e2m1, e4m3, ue8m0};

/// Matrices of `rows` x `cols` (how many follows from `codes`), in blocks of `block`; blocks at the edges may be
/// partial. Scales: one for each block, row-major, matrix after matrix.
///
/// # Numerics
/// code times 2^scale, rounded once.
pub fn mxfp8(codes: &[u8], scales: &[u8], [rows, cols]: [usize; 2], block: [usize; 2]) -> Vec<f32> {
    let place = Places::new([rows, cols], block);
    let value = |(i, &code): (usize, &u8)| e4m3::to_f32(code) * ue8m0::to_f32(scales[place.of(i)]);
    codes.iter().enumerate().map(value).collect()
}

/// As [`mxfp8`], with f32 inverse scales.
///
/// # Numerics
/// code times inverse scale, rounded once.
pub fn fp8_block(codes: &[u8], scale_inv: &[f32], [rows, cols]: [usize; 2], block: [usize; 2]) -> Vec<f32> {
    let place = Places::new([rows, cols], block);
    let value = |(i, &code): (usize, &u8)| e4m3::to_f32(code) * scale_inv[place.of(i)];
    codes.iter().enumerate().map(value).collect()
}

/// Two codes in a byte, the low nibble first; one e4m3 scale for each 16 codes; the tensor's amax.
///
/// # Numerics
/// code times scale (exact) times amax / 2688 (1 where amax is 0 or infinite), rounded once.
pub fn nvfp4(codes: &[u8], scales: &[u8], amax: f32) -> Vec<f32> {
    let tensor = Nvfp4::tensor_scale(amax);
    let both = |(i, &byte): (usize, &u8)| {
        let scale = e4m3::to_f32(scales[i / 8]);
        [byte & 15, byte >> 4].map(|code| e2m1::to_f32(code) * scale * tensor)
    };
    codes.iter().enumerate().flat_map(both).collect()
}

/// Where the scale of an element lies.
struct Places {
    rows: usize,
    cols: usize,
    block: [usize; 2],
}

impl Places {
    fn new([rows, cols]: [usize; 2], block: [usize; 2]) -> Places {
        Places { rows, cols, block }
    }

    fn of(&self, element: usize) -> usize {
        let (row, col) = (element / self.cols, element % self.cols);
        let down = row / self.rows * self.rows.div_ceil(self.block[0]) + row % self.rows / self.block[0];
        down * self.cols.div_ceil(self.block[1]) + col / self.block[1]
    }
}
