//! Matrix products over ragged groups of rows: the operands as strides.

use dropless_core::numerics::mma::Tensorcore;
use dropless_core::ops::{Checked, Extents, GemmKind, GroupedGemm, Operand};
use dropless_core::{DType, NumericModel, Result, Tensor};

use crate::dispatch::{Dispatch, Stream, word};
use crate::shader::{Binding, FLOAT, FORMATS, MMA, PRELUDE, Shader, U32, params};

/// Outputs of a workgroup, as in the shader.
const TILE: [usize; 2] = [8, 64];

params!(
    /// Extents, and the distances between neighbours in memory, in elements.
    Params {
        groups,
        rows,
        columns,
        chain,
        column_tiles,
        out_group,
        a_row,
        a_chain,
        a_scale_row,
        a_scale_chain,
        b_group,
        b_column,
        b_chain,
        b_scale_group,
        b_scale_column,
        b_scale_chain,
        b_scale_columns,
    }
);

pub(crate) static GROUPED_GEMM: Shader = Shader {
    name: "grouped_gemm",
    files: &[PRELUDE, FORMATS, MMA, include_str!("../../../shaders/grouped_gemm.wgsl")],
    params: Params::DECLARATION,
    bindings: &[
        Binding::read("a", &[DType::F32, DType::Bf16, DType::E4m3]),
        Binding::read("a_gather", U32).optional(),
        Binding::read("a_scale", &[DType::F32, DType::Ue8m0]).optional(),
        Binding::read("b", &[DType::F32, DType::Bf16, DType::E4m3]),
        Binding::read("b_gather", U32).optional(),
        Binding::read("b_scale", &[DType::F32, DType::Ue8m0]).optional(),
        Binding::read("offsets", U32),
        Binding::in_place("out", FLOAT),
    ],
    constants: &["RAGGED_CHAIN", "FORMAT", "MODEL", "ACCUMULATE", "STEP", "FRACTION_BITS", "RESULT_BITS"],
};

/// The elements of an operand, its row indices, and its scales.
type Parts<'a> = (&'a Tensor, Option<&'a Tensor>, Option<&'a Tensor>);

fn parts<'a>(operand: Operand<'a>) -> Parts<'a> {
    match operand {
        Operand::Plain { values, gather } => (values, gather, None),
        Operand::Mxfp8 { codes, scales } => (codes, None, Some(scales)),
        Operand::Fp8Block { codes, scale_inv } => (codes, None, Some(scale_inv)),
    }
}

/// How the shader reads both operands; the values are its constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    F32 = 0,
    Bf16 = 1,
    Mxfp8 = 2,
    Fp8Block = 3,
}

impl Format {
    fn of(operand: Operand<'_>) -> Format {
        match operand {
            Operand::Plain { values, .. } if values.dtype() == DType::F32 => Format::F32,
            Operand::Plain { .. } => Format::Bf16,
            Operand::Mxfp8 { .. } => Format::Mxfp8,
            Operand::Fp8Block { .. } => Format::Fp8Block,
        }
    }

    /// The matrix unit that multiplies it, if the model has one.
    fn unit(self, model: NumericModel) -> Option<Tensorcore> {
        match self {
            Format::F32 => None,
            Format::Bf16 | Format::Mxfp8 => Tensorcore::of_bf16(model),
            Format::Fp8Block => Tensorcore::of_e4m3(model),
        }
    }
}

/// Distances in memory of a factor: from row to row, and along the chain.
fn strides(rows: usize, chain: usize, chain_last: bool) -> [usize; 2] {
    if chain_last { [chain, 1] } else { [1, rows] }
}

pub(crate) fn run(stream: &Stream, op: &Checked<GroupedGemm<'_>>, model: NumericModel) -> Result<()> {
    let Extents { groups, rows: tokens, n, k } = op.extents();
    let format = Format::of(op.a);
    let wgrad = op.kind == GemmKind::Wgrad;
    // Rows of each factor, the chain, and whether it is the last dimension of a and of b.
    let (rows, columns, chain, mut a_last, mut b_last) = match op.kind {
        GemmKind::Forward => (tokens, n, k, true, true),
        GemmKind::Dgrad => (tokens, k, n, true, false),
        GemmKind::Wgrad => (n, k, tokens, false, false),
    };
    if format == Format::Fp8Block {
        (a_last, b_last) = (true, true);
    }
    let [a_row, a_chain] = strides(rows, chain, a_last);
    let [b_column, b_chain] = strides(columns, chain, b_last);
    let block = if format == Format::Fp8Block { 128 } else { 32 };
    let blocks = chain.div_ceil(block);
    // A weight's FP8 scales also span 128 of its rows.
    let b_scale_columns = if format == Format::Fp8Block && !wgrad { 128 } else { 1 };
    let b_scale_rows = columns.div_ceil(b_scale_columns);
    let [a_scale_row, a_scale_chain] = strides(rows, blocks, a_last);
    let [b_scale_column, b_scale_chain] = strides(b_scale_rows, blocks, b_last);
    let column_tiles = columns.div_ceil(TILE[1]);
    let row_tiles = if wgrad { groups * rows.div_ceil(TILE[0]) } else { rows.div_ceil(TILE[0]) + groups };

    let params = Params {
        groups: word(groups),
        rows: word(rows),
        columns: word(columns),
        chain: word(chain),
        column_tiles: word(column_tiles),
        out_group: if wgrad { word(rows) } else { 0 },
        a_row: word(a_row),
        a_chain: word(a_chain),
        a_scale_row: word(a_scale_row),
        a_scale_chain: word(a_scale_chain),
        b_group: if wgrad { 0 } else { word(columns * chain) },
        b_column: word(b_column),
        b_chain: word(b_chain),
        b_scale_group: if wgrad { 0 } else { word(b_scale_rows * blocks) },
        b_scale_column: word(b_scale_column),
        b_scale_chain: word(b_scale_chain),
        b_scale_columns: word(b_scale_columns),
    };
    let unit = format.unit(model);
    let Tensorcore { step, fraction_bits, result_bits } = unit.unwrap_or(Tensorcore::HOPPER_BF16);
    let constants = [
        u32::from(wgrad),
        format as u32,
        u32::from(unit.is_some()),
        u32::from(op.accumulate),
        word(step),
        fraction_bits.cast_unsigned(),
        result_bits.cast_unsigned(),
    ];
    let ((a, a_gather, a_scale), (b, b_gather, b_scale)) = (parts(op.a), parts(op.b));
    let tensors = [Some(a), a_gather, a_scale, Some(b), b_gather, b_scale, Some(op.offsets), Some(op.out)];
    // Row tiles times column tiles; the shader finds the group of each.
    let workgroups = row_tiles as u64 * column_tiles as u64;
    stream.dispatch(Dispatch { shader: &GROUPED_GEMM, tensors: &tensors, constants: &constants, params: params.words(), workgroups })
}
