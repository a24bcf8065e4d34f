//! The factors of a grouped product: where each group's elements lie, and the three operand formats.
//! NUMERICS.md, "Matrix products" and "Block formats".

use std::ops::Range;

use bytemuck::{AnyBitPattern, cast_slice};
use rayon::prelude::*;

use super::OP;
use crate::error::Result;
use crate::host::Simd;
use crate::host::memory::{Floats, Gathered, Input, gathered, input, input_opt};
use crate::host::product::{Axis, Elements, Matrix, product};
use crate::numerics::{NumericModel, bf16, e4m3, mma, ue8m0};
use crate::ops::{Operand, Ragged, SPLIT_BLOCK, Side, Split, offsets};
use crate::tensor::Tensor;

/// Elements along the chain that share an MXFP8 scale.
const MX_BLOCK: usize = 32;
/// Elements along the chain (and rows of a weight) that share an FP8-block scale.
const FP8_BLOCK: usize = 128;

/// The offsets as they count.
pub(super) struct Groups(Vec<usize>);

impl Groups {
    pub(super) fn new(offsets: &[u32], rows: usize, block: usize) -> Self {
        Groups(offsets::counted(offsets, rows, block))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len() - 1
    }

    pub(super) fn rows(&self, group: usize) -> Range<usize> {
        self.0[group]..self.0[group + 1]
    }

    /// Rows in all groups.
    fn total(&self) -> usize {
        self.0[self.len()]
    }
}

/// A factor's values.
enum Values<'a> {
    Plain {
        values: Input<'a>,
        gather: Option<Input<'a>>,
    },
    /// Rows gathered beforehand, as some are not there; MXFP8 as bf16.
    Gathered(Gathered),
    /// MXFP8 for a matrix unit that takes scales.
    Mxfp8 {
        codes: Numbers<'a, u8>,
        scales: Numbers<'a, u8>,
    },
    Fp8Block {
        codes: Numbers<'a, u8>,
        scale_inv: Numbers<'a, f32>,
    },
    /// f32 as bf16 parts.
    Split([Vec<u16>; 3]),
}

/// Codes or scales as they lie in memory, or their gathered rows.
enum Numbers<'a, T> {
    There(Input<'a>),
    Gathered(Vec<T>),
}

impl<'a, T: AnyBitPattern + Default> Numbers<'a, T> {
    fn of(tensor: &'a Tensor, index: Option<&[u32]>) -> Result<Numbers<'a, T>> {
        let numbers = input(OP, tensor)?;
        Ok(match index {
            None => Numbers::There(numbers),
            Some(index) => Numbers::Gathered(gathered(cast_slice(numbers.bytes()), tensor.cols(), index)),
        })
    }

    fn get(&self) -> &[T] {
        match self {
            Numbers::There(numbers) => cast_slice(numbers.bytes()),
            Numbers::Gathered(numbers) => numbers,
        }
    }
}

/// A factor, locked for reading.
pub(super) struct Factor<'a> {
    side: Side,
    values: Values<'a>,
}

impl<'a> Factor<'a> {
    /// Locks the operand.
    pub(super) fn load(operand: Operand<'a>, mut side: Side, groups: &Groups, model: NumericModel) -> Result<Self> {
        let values = match operand {
            Operand::Plain { values, gather } => {
                let (cols, rows) = (values.cols(), values.rows());
                let (values, gather) = (input(OP, values)?, input_opt(OP, gather)?);
                let index = gather.as_ref().map_or(&[][..], |index| &index.u32()[..groups.total()]);
                if index.iter().all(|&row| (row as usize) < rows) {
                    Values::Plain { values, gather }
                } else {
                    Values::Gathered(Gathered::of(values.floats(), cols, index))
                }
            }
            Operand::Mxfp8 { codes, scales, gather } => {
                let (cols, gather) = (codes.cols(), input_opt(OP, gather)?);
                let index = gather.as_ref().map(|index| &index.u32()[..groups.total()]);
                let (codes, scales) = (Numbers::of(codes, index)?, Numbers::of(scales, index)?);
                if model == NumericModel::Blackwell {
                    Values::Mxfp8 { codes, scales }
                } else {
                    let used = if side.ragged == Ragged::Stacked { codes.get().len() } else { groups.total() * cols };
                    let values = dequantize(&codes.get()[..used], scales.get(), cols, side.chain_last);
                    Values::Gathered(Gathered::Bf16(values))
                }
            }
            Operand::Fp8Block { codes, scale_inv, gather } => {
                side = side.chain_last();
                let gather = input_opt(OP, gather)?;
                let index = gather.as_ref().map(|index| &index.u32()[..groups.total()]);
                Values::Fp8Block { codes: Numbers::of(codes, index)?, scale_inv: Numbers::of(scale_inv, index)? }
            }
            Operand::Split { values } => {
                let (values, cols) = (input(OP, values)?, values.cols());
                let values = values.f32();
                let used = if side.ragged == Ragged::Stacked { values.len() } else { groups.total() * cols };
                let part = |k: usize| values[..used].par_iter().map(|&x| Split::of(x).parts()[k]).collect();
                Values::Split([part(0), part(1), part(2)])
            }
        };
        Ok(Factor { side, values })
    }

    /// `rows` rows from `row` on of a group whose rows start at `start`.
    pub(super) fn block(&self, group: usize, start: usize, row: usize, rows: usize) -> Block<'_> {
        let row = if self.side.ragged == Ragged::Rows { start + row } else { row };
        Block { factor: self, group, row, rows }
    }
}

/// MXFP8 to bf16: exact but for the ends of the exponent range.
fn dequantize(codes: &[u8], scales: &[u8], cols: usize, chain_last: bool) -> Vec<u16> {
    let mut out = vec![0; codes.len()];
    if cols == 0 {
        return out;
    }
    out.par_chunks_mut(cols).zip(codes.par_chunks(cols)).enumerate().for_each(|(row, (out, codes))| {
        for (col, (out, &code)) in out.iter_mut().zip(codes).enumerate() {
            let scale = if chain_last { (row * cols + col) / MX_BLOCK } else { row / MX_BLOCK * cols + col };
            *out = bf16::from_f32(e4m3::to_f32(code) * ue8m0::to_f32(scales[scale]));
        }
    });
    out
}

/// Some rows of a factor within one group; `row` counts from the start of the group's matrix or of all ragged rows.
pub(super) struct Block<'a> {
    factor: &'a Factor<'a>,
    group: usize,
    row: usize,
    rows: usize,
}

impl<'a> Block<'a> {
    /// The elements from `from` on along the chain.
    fn matrix(&self, data: Elements<'a>, gather: Option<&'a [u32]>, from: usize) -> Matrix<'a> {
        let side = self.factor.side;
        let [row_stride, chain_stride] = side.strides();
        let (mut row, mut chain) = (Axis::strided(row_stride), Axis::strided(chain_stride));
        let mut offset = side.place(self.group, 0, 0);
        match (gather, side.ragged) {
            (Some(index), Ragged::Rows) => {
                row.gather = Some(&index[self.row..]);
                offset += from * chain_stride;
            }
            (Some(index), Ragged::Chain) => {
                chain.gather = Some(&index[from..]);
                offset += self.row * row_stride;
            }
            _ => offset += self.row * row_stride + from * chain_stride,
        }
        Matrix { data, offset, rows: self.rows, row, chain }
    }

    /// The FP8-block scale of row i for the part of the chain that starts at `from`.
    fn fp8_scale(&self, scale_inv: &[f32], i: usize, from: usize) -> f32 {
        let (side, row) = (self.factor.side, self.row + i);
        let row = if side.ragged == Ragged::Stacked { row / FP8_BLOCK } else { row };
        scale_inv[side.fp8_scales().place(self.group, row, from / FP8_BLOCK)]
    }

    /// The MXFP8 codes of row i along `chain`, with their scales.
    fn mxfp8(&self, codes: &[u8], scales: &[u8], i: usize, chain: Range<usize>) -> [Vec<u8>; 2] {
        let side = self.factor.side;
        let along = |data: &[u8], side: Side, chain: Range<usize>| {
            chain.map(|t| data[side.place(self.group, self.row + i, t)]).collect()
        };
        let scale_chain = chain.start / MX_BLOCK..chain.end.div_ceil(MX_BLOCK);
        [along(codes, side, chain), along(scales, side.mxfp8_scales(), scale_chain)]
    }
}

/// `out[i * b.rows + j] = a(i, ..) . b(j, ..)` over the non-empty range `chain`; `out` starts with zeros.
pub(super) fn multiply(
    model: NumericModel,
    simd: Simd,
    a: &Block<'_>,
    b: &Block<'_>,
    chain: Range<usize>,
    out: &mut [f32],
) {
    let ldc = b.rows;
    match (&a.factor.values, &b.factor.values) {
        (Values::Fp8Block { codes: x, scale_inv: sx }, Values::Fp8Block { codes: y, scale_inv: sy }) => {
            let (x, y, sx, sy) = (Elements::E4m3(x.get()), Elements::E4m3(y.get()), sx.get(), sy.get());
            let mut part = vec![0.0; out.len()];
            for from in chain.clone().step_by(FP8_BLOCK) {
                let k = FP8_BLOCK.min(chain.end - from);
                part.fill(0.0);
                product(model, simd, a.matrix(x, None, from), b.matrix(y, None, from), k, &mut part, ldc);
                let columns: Vec<f32> = (0..b.rows).map(|j| b.fp8_scale(sy, j, from)).collect();
                for (i, (out, part)) in out.chunks_mut(ldc).zip(part.chunks(ldc)).enumerate() {
                    let scale = a.fp8_scale(sx, i, from);
                    for ((acc, &part), &column) in out.iter_mut().zip(part).zip(&columns) {
                        *acc = part.mul_add(scale * column, *acc);
                    }
                }
            }
        }
        (Values::Mxfp8 { codes: x, scales: sx }, Values::Mxfp8 { codes: y, scales: sy }) => {
            let columns: Vec<_> = (0..b.rows).map(|j| b.mxfp8(y.get(), sy.get(), j, chain.clone())).collect();
            for (i, out) in out.chunks_mut(ldc).enumerate() {
                let [x, sx] = a.mxfp8(x.get(), sx.get(), i, chain.clone());
                for (acc, [y, sy]) in out.iter_mut().zip(&columns) {
                    *acc = mma::dot_mxfp8(&x, &sx, y, sy, *acc);
                }
            }
        }
        (x @ Values::Split(_), y) | (x, y @ Values::Split(_)) => {
            let (x_parts, y_parts) = (x.parts(), y.parts());
            let mut part = vec![0.0; out.len()];
            for from in chain.clone().step_by(SPLIT_BLOCK) {
                let k = SPLIT_BLOCK.min(chain.end - from);
                part.fill(0.0);
                for &[i, j] in Split::pairs([&x_parts, &y_parts].map(|parts| parts.len() > 1)) {
                    let (a, b) = (a.matrix(x_parts[i], x.gather(), from), b.matrix(y_parts[j], y.gather(), from));
                    product(model, simd, a, b, k, &mut part, ldc);
                }
                out.iter_mut().zip(&part).for_each(|(acc, &part)| *acc += part);
            }
        }
        (x, y) => {
            let a = a.matrix(x.elements(), x.gather(), chain.start);
            let b = b.matrix(y.elements(), y.gather(), chain.start);
            product(model, simd, a, b, chain.len(), out, ldc);
        }
    }
}

fn elements_of(values: Floats<'_>) -> Elements<'_> {
    match values {
        Floats::F32(values) => Elements::F32(values),
        Floats::Bf16(codes) => Elements::Bf16(codes),
    }
}

impl Values<'_> {
    fn elements(&self) -> Elements<'_> {
        match self {
            Values::Plain { values, .. } => elements_of(values.floats()),
            Values::Gathered(values) => elements_of(values.floats()),
            Values::Mxfp8 { codes, .. } | Values::Fp8Block { codes, .. } => Elements::E4m3(codes.get()),
            Values::Split([.., high]) => Elements::Bf16(high),
        }
    }

    /// The smallest first; a factor that is not split is its own only part.
    fn parts(&self) -> Vec<Elements<'_>> {
        match self {
            Values::Split(parts) => parts.iter().map(|part| Elements::Bf16(part)).collect(),
            whole => vec![whole.elements()],
        }
    }

    fn gather(&self) -> Option<&[u32]> {
        match self {
            Values::Plain { gather: Some(index), .. } => Some(index.u32()),
            _ => None,
        }
    }
}
