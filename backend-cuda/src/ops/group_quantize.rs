//! Block quantization: the amax of the tensor first where the format has one, then blocks along rows and columns from one
//! reading of the input.

use std::sync::Arc;

use dropless_core::ops::{BlockFormat, Checked, GroupQuantize};
use dropless_core::{DType, Result, Tensor};

use crate::device::Gpu;
use crate::kernel::{
    BLOCKS, Binding, F32, FLOAT, GROUP_ENDS, Kernel, Launch, PHILOX, PRELUDE, RUNS, SCAN, U32, scalars, word,
};

const OP: &str = "group_quantize";

const CODES: &[DType] = &[DType::E4m3, DType::E2m1x2];
const SCALES: &[DType] = &[DType::Ue8m0, DType::F32, DType::E4m3];

scalars!(
    /// Extents (`group_rows`: rows of a stacked matrix; `height`: rows of the transposed result), the stochastic
    /// rounding's key and counter stream, and the rows to gather from.
    pub(crate) struct QuantizeScalars { rows, columns, groups, group_rows, height, key_low, key_high, stream, sources }
);

pub(crate) static QUANTIZE: Kernel<QuantizeScalars> = Kernel::new(
    "group_quantize",
    &[PRELUDE, RUNS, BLOCKS, PHILOX, include_str!("../../../kernels/group_quantize.cu")],
    &[
        Binding::read("x", FLOAT),
        Binding::read("gather", U32).optional(),
        Binding::read("offsets", U32).optional(),
        Binding::read("padded", U32).optional(),
        Binding::read("whole", F32).optional(),
        Binding::write("row_codes", CODES).optional(),
        Binding::write("row_scales", SCALES).optional(),
        Binding::write("column_codes", &[DType::E4m3]).optional(),
        Binding::write("column_scales", &[DType::Ue8m0, DType::F32]).optional(),
    ],
)
.constants(&["FORMAT", "OPTION", "ROWS", "SQUARE"]);

/// Columns of a tile, and what a thread has of it.
const TILE_COLUMNS: usize = 128;
const THREAD_ELEMENTS: usize = 64;

pub(crate) static AMAX: Kernel<QuantizeScalars> = Kernel::new(
    "group_quantize_amax",
    &[PRELUDE, RUNS, include_str!("../../../kernels/group_quantize_amax.cu")],
    &[
        Binding::read("x", FLOAT),
        Binding::read("gather", U32).optional(),
        Binding::read("offsets", U32).optional(),
        Binding::in_place("amax", F32),
    ],
);

scalars!(
    /// Groups, all rows, and rows of a block.
    pub(crate) struct OffsetsScalars { groups, rows, block }
);

pub(crate) static OFFSETS: Kernel<OffsetsScalars> = Kernel::new(
    "group_quantize_offsets",
    &[PRELUDE, SCAN, GROUP_ENDS, include_str!("../../../kernels/group_quantize_offsets.cu")],
    &[Binding::read("offsets", U32), Binding::write("counted", U32), Binding::write("padded", U32)],
);

pub(crate) fn run(gpu: &Arc<Gpu>, op: &Checked<GroupQuantize<'_>>) -> Result<()> {
    let (x, rows, block) = (op.x, op.rows(), op.format.block());
    // Blocks that span rows keep within a group or a matrix; else all rows are alike.
    let spans_rows = op.column.is_some() || op.square;
    let (groups, group_rows) = match op.offsets {
        Some(offsets) => (offsets.len() - 1, rows),
        None if spans_rows => (x.shape()[0], x.shape()[1]),
        None => (1, rows),
    };
    let padded = op.column.and_then(|column| column.offsets);
    let transposed = matches!(op.format, BlockFormat::Fp8Block { .. });
    let height = match op.column {
        Some(column) if transposed => column.codes.cols(),
        Some(column) => column.codes.rows(),
        None => 0,
    };
    let (format, key, stream) = match op.format {
        BlockFormat::Mxfp8 { floor } => ([0, u32::from(floor)], 0, 0),
        BlockFormat::Fp8Block { f32_scale } => ([1, u32::from(f32_scale)], 0, 0),
        BlockFormat::Nvfp4 { stochastic: None } => ([2, 0], 0, 0),
        BlockFormat::Nvfp4 { stochastic: Some((key, stream)) } => ([2, 1], key, stream),
    };
    let [key_low, key_high] = bytemuck::cast::<u64, [u32; 2]>(key.to_le()).map(u32::from_le);
    let scalars = QuantizeScalars {
        rows: word(rows),
        columns: word(x.cols()),
        groups: word(groups),
        group_rows: word(group_rows),
        height: word(height),
        key_low,
        key_high,
        stream,
        sources: word(x.rows()),
    };
    if let Some(out) = op.amax {
        amax(gpu, op, scalars, out)?;
    }
    // The offsets as they count, where blocks along the rows need each of them.
    let mut counted = None;
    if let (Some(offsets), Some(padded)) = (op.offsets, padded) {
        let scalars = OffsetsScalars { groups: word(groups), rows: word(rows), block: word(block) };
        let counted = counted.insert(gpu.alloc(DType::U32, &[groups + 1])?);
        gpu.launch(Launch::new(&OFFSETS, scalars, &[Some(offsets), Some(counted), Some(padded)], 1, 32))?;
    }
    if op.row.is_none() && op.column.is_none() {
        return Ok(());
    }
    let tile_rows = if spans_rows { block } else { 32 };
    // Of ragged groups as many as the rows can need in the worst case.
    let tiles = if padded.is_some() { height / block } else { groups * group_rows.div_ceil(tile_rows) };
    let tensors = [
        Some(x),
        op.gather,
        counted.as_ref().or(op.offsets),
        padded,
        op.amax,
        op.row.map(|row| row.codes),
        op.row.map(|row| row.scales),
        op.column.map(|column| column.codes),
        op.column.map(|column| column.scales),
    ];
    let constants = &[format[0], format[1], word(tile_rows), u32::from(op.square)];
    let blocks = tiles * x.cols().div_ceil(TILE_COLUMNS);
    let threads = word(tile_rows * TILE_COLUMNS / THREAD_ELEMENTS);
    gpu.launch(Launch { constants, ..Launch::new(&QUANTIZE, scalars, &tensors, blocks, threads) })
}

/// The amax of the rows within the groups.
fn amax(gpu: &Arc<Gpu>, op: &GroupQuantize<'_>, scalars: QuantizeScalars, out: &Tensor) -> Result<()> {
    const THREADS: u32 = 256;
    gpu.fill(OP, out, 0)?;
    // Enough thread blocks to fill the card, each with at least an octet for every thread.
    let elements = op.rows() * op.x.cols();
    let blocks = elements.div_ceil(THREADS as usize * 8).min(gpu.multiprocessors as usize * 8);
    gpu.launch(Launch::new(&AMAX, scalars, &[Some(op.x), op.gather, op.offsets, Some(out)], blocks, THREADS))
}
