//! Block quantization: amaxes of squares or of the tensor first, then blocks along rows, then blocks along columns.

use dropless_core::ops::{BlockFormat, Checked, ColumnBlocks, GroupQuantize, RowBlocks};
use dropless_core::{DType, Result, Tensor};

use super::map::{elementwise, rows::gather_rows};
use crate::buffer;
use crate::dispatch::{Dispatch, Stream};
use crate::shader::{
    BLOCKS, Binding, F32, FLOAT, FORMATS, INTEGERS, OFFSETS, PHILOX, PRELUDE, Shader, U32, scalars, word,
};

const CODES: &[DType] = &[DType::E4m3, DType::E2m1x2];
const SCALES: &[DType] = &[DType::Ue8m0, DType::F32, DType::E4m3];

scalars!(
    /// Extents: of all that is quantized (`group_rows`: rows of a stacked matrix), and in blocks (`row_blocks` across,
    /// `grid_rows` down a matrix).
    pub(crate) struct QuantizeScalars { elements, groups, group_rows, columns, row_blocks, grid_rows, padded_rows, key_low, key_high, stream }
);

pub(crate) static AMAX: Shader<QuantizeScalars> = Shader::new(
    "group_quantize_amax",
    &[PRELUDE, FORMATS, BLOCKS, include_str!("../../../shaders/group_quantize_amax.wgsl")],
    &[Binding::read("x", FLOAT), Binding::read("offsets", U32).optional(), Binding::atomic("amax", F32)],
)
.constants(&["FORMAT", "OPTION", "BLOCK", "SQUARES"]);

pub(crate) static ROWS: Shader<QuantizeScalars> = Shader::new(
    "group_quantize_rows",
    &[PRELUDE, FORMATS, INTEGERS, PHILOX, BLOCKS, include_str!("../../../shaders/group_quantize_rows.wgsl")],
    &[
        Binding::read("x", FLOAT),
        Binding::read("offsets", U32).optional(),
        Binding::read("squares", F32).optional(),
        Binding::read("whole", F32).optional(),
        Binding::write("codes", CODES),
        Binding::write("scales", SCALES).optional(),
    ],
)
.constants(&["FORMAT", "OPTION", "BLOCK"]);

pub(crate) static COLUMNS: Shader<QuantizeScalars> = Shader::new(
    "group_quantize_columns",
    &[PRELUDE, FORMATS, OFFSETS, BLOCKS, include_str!("../../../shaders/group_quantize_columns.wgsl")],
    &[
        Binding::read("x", FLOAT),
        Binding::read("offsets", U32).optional(),
        Binding::read("squares", F32).optional(),
        Binding::write("codes", &[DType::E4m3]),
        Binding::write("scales", &[DType::Ue8m0, DType::F32]).optional(),
    ],
)
.constants(&["FORMAT", "OPTION", "BLOCK", "TRANSPOSED", "PADDED"]);

pub(crate) static SQUARE_SCALES: Shader<QuantizeScalars> = Shader::new(
    "group_quantize_scales",
    &[PRELUDE, FORMATS, BLOCKS, include_str!("../../../shaders/group_quantize_scales.wgsl")],
    &[
        Binding::read("squares", F32),
        Binding::write("row_scales", F32).optional(),
        Binding::write("column_scales", F32).optional(),
    ],
)
.constants(&["FORMAT", "OPTION"]);

scalars!(
    /// Extents; `elements` is 1.
    pub(crate) struct OffsetsScalars { elements, groups, rows, block }
);

pub(crate) static PADDED_OFFSETS: Shader<OffsetsScalars> = Shader::new(
    "group_quantize_offsets",
    &[OFFSETS, include_str!("../../../shaders/group_quantize_offsets.wgsl")],
    &[Binding::read("offsets", U32), Binding::write("padded", U32)],
);

/// What every pass takes.
struct Quantize<'a> {
    stream: &'a Stream,
    op: &'a GroupQuantize<'a>,
    scalars: QuantizeScalars,
    /// FORMAT and OPTION of the shaders.
    format: [u32; 2],
    /// The amaxes of the squares.
    squares: Option<Tensor>,
}

pub(crate) fn run(stream: &Stream, op: &Checked<GroupQuantize<'_>>) -> Result<()> {
    let Some(index) = op.gather else { return quantize(stream, op) };
    let x = buffer::alloc(&stream.gpu, op.x.dtype(), &[index.len(), op.x.cols()])?;
    gather_rows(stream, op.x, index, &x)?;
    quantize(stream, &GroupQuantize { x: &x, gather: None, ..**op })
}

/// Without a gather.
fn quantize(stream: &Stream, op: &GroupQuantize<'_>) -> Result<()> {
    let (x, block) = (op.x, op.format.block());
    let (groups, group_rows) = match op.offsets {
        Some(offsets) => (offsets.len() - 1, x.rows()),
        None => (x.shape()[0], x.shape()[1]),
    };
    let (format, key, counter) = match op.format {
        BlockFormat::Mxfp8 { floor } => ([0, u32::from(floor)], 0, 0),
        BlockFormat::Fp8Block { f32_scale } => ([1, u32::from(f32_scale)], 0, 0),
        BlockFormat::Nvfp4 { stochastic: None } => ([2, 0], 0, 0),
        BlockFormat::Nvfp4 { stochastic: Some((key, counter)) } => ([2, 1], key, counter),
    };
    let [key_low, key_high] = bytemuck::cast::<u64, [u32; 2]>(key.to_le()).map(u32::from_le);
    let scalars = QuantizeScalars {
        elements: 0,
        groups: word(groups),
        group_rows: word(group_rows.max(1)),
        columns: word(x.cols()),
        row_blocks: word(x.cols().div_ceil(block)),
        grid_rows: word(group_rows.div_ceil(block)),
        padded_rows: 0,
        key_low,
        key_high,
        stream: counter,
    };
    let mut quantize = Quantize { stream, op, scalars, format, squares: None };
    if op.square {
        let shape = [groups, group_rows.div_ceil(block), x.cols().div_ceil(block)];
        // New memory is zero: the amax of nothing.
        let squares = buffer::alloc(&stream.gpu, DType::F32, &shape)?;
        quantize.amax(&squares, true)?;
        quantize.squares = Some(squares);
    }
    if let Some(amax) = op.amax {
        elementwise::fill_bits(stream, amax, 0)?;
        quantize.amax(amax, false)?;
    }
    if let Some(row) = op.row {
        quantize.rows(row)?;
    }
    if let Some(column) = op.column {
        quantize.columns(column)?;
    }
    quantize.square_scales()
}

impl Quantize<'_> {
    fn dispatch(
        &self,
        shader: &'static Shader<QuantizeScalars>,
        tensors: &[Option<&Tensor>],
        constants: &[u32],
        elements: usize,
        padded_rows: usize,
    ) -> Result<()> {
        let scalars = QuantizeScalars { elements: word(elements), padded_rows: word(padded_rows), ..self.scalars };
        let constants = &[&self.format[..], constants].concat();
        let workgroups = elements.div_ceil(64);
        self.stream.dispatch(Dispatch { shader, tensors, constants, scalars, workgroups })
    }

    fn block(&self) -> usize {
        self.op.format.block()
    }

    /// Blocks along all rows.
    fn row_blocks(&self) -> usize {
        self.op.x.rows() * self.op.x.cols().div_ceil(self.block())
    }

    fn amax(&self, out: &Tensor, squares: bool) -> Result<()> {
        let constants = [word(self.block()), u32::from(squares)];
        self.dispatch(&AMAX, &[Some(self.op.x), self.op.offsets, Some(out)], &constants, self.row_blocks(), 0)
    }

    /// FP8 blocks store one scale for a square, the others one for each of its rows or columns.
    fn one_scale_a_square(&self) -> bool {
        self.op.square && matches!(self.op.format, BlockFormat::Fp8Block { .. })
    }

    fn rows(&self, row: RowBlocks<'_>) -> Result<()> {
        let scales = (!self.one_scale_a_square()).then_some(row.scales);
        let tensors = [Some(self.op.x), self.op.offsets, self.squares.as_ref(), self.op.amax, Some(row.codes), scales];
        self.dispatch(&ROWS, &tensors, &[word(self.block())], self.row_blocks(), 0)
    }

    fn columns(&self, column: ColumnBlocks<'_>) -> Result<()> {
        let (x, block) = (self.op.x, self.block());
        let transposed = matches!(self.op.format, BlockFormat::Fp8Block { .. });
        let padded = self.op.offsets.is_some();
        if let (Some(offsets), Some(out)) = (self.op.offsets, column.offsets) {
            let scalars =
                OffsetsScalars { elements: 1, groups: self.scalars.groups, rows: word(x.rows()), block: word(block) };
            self.stream.dispatch(Dispatch::new(&PADDED_OFFSETS, scalars, &[Some(offsets), Some(out)], 1))?;
        }
        // As many blocks as the rows can have in the worst case.
        let padded_rows = if transposed { column.codes.cols() } else { column.codes.rows() };
        let blocks = if padded { padded_rows / block } else { x.shape()[0] * x.shape()[1].div_ceil(block) };
        let scales = (!self.one_scale_a_square()).then_some(column.scales);
        let tensors = [Some(x), self.op.offsets, self.squares.as_ref(), Some(column.codes), scales];
        let constants = [word(block), u32::from(transposed), u32::from(padded)];
        self.dispatch(&COLUMNS, &tensors, &constants, blocks * x.cols(), padded_rows)
    }

    fn square_scales(&self) -> Result<()> {
        match &self.squares {
            Some(squares) if self.one_scale_a_square() => {
                let (row, column) = (self.op.row.map(|row| row.scales), self.op.column.map(|column| column.scales));
                self.dispatch(&SQUARE_SCALES, &[Some(squares), row, column], &[], squares.len(), 0)
            }
            _ => Ok(()),
        }
    }
}
