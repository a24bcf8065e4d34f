//! Matrix products over ragged groups of rows: the operands as strides.

use std::borrow::Cow;

use dropless_core::numerics::mma::Tensorcore;
use dropless_core::ops::{Checked, GemmKind, GroupedGemm, Operand, Product, Side, Split};
use dropless_core::{DType, NumericModel, Result, Tensor};

use super::chains::{Chains, SIDE, aligned, tile};
use super::{mxfp8_dequantize, split};
use crate::dispatch::{Dispatch, Stream};
use crate::shader::{Binding, FLOAT, FORMATS, MMA, OFFSETS, OPERANDS, PRELUDE, Shader, U32, scalars, word};

scalars!(
    /// Extents, and the distances between neighbours in memory, in elements; rows to gather from; what offsets count up
    /// to, and in steps of what.
    pub(crate) struct GemmScalars {
        groups,
        rows,
        columns,
        chain,
        column_tiles,
        out_group,
        a_row,
        a_chain,
        b_group,
        b_column,
        b_chain,
        scale_chain,
        a_gathered,
        b_gathered,
        a_sources,
        b_sources,
        offsets_end,
        offsets_block,
        a_plane,
        b_plane,
    }
);

pub(crate) static GROUPED_GEMM: Shader<GemmScalars> = Shader::new(
    "grouped_gemm",
    &[PRELUDE, FORMATS, OFFSETS, MMA, OPERANDS, include_str!("../../../shaders/grouped_gemm.wgsl")],
    &[
        Binding::read_units("a", &[DType::F32, DType::Bf16, DType::E4m3]),
        Binding::read("a_gather", U32),
        Binding::read("a_scale", &[DType::F32]).optional(),
        Binding::read_units("b", &[DType::F32, DType::Bf16, DType::E4m3]),
        Binding::read("b_gather", U32),
        Binding::read("b_scale", &[DType::F32]).optional(),
        Binding::read("offsets", U32),
        Binding::in_place("out", FLOAT),
    ],
)
.constants(&[
    "TILE",
    "PAIRS",
    "STEP",
    "FRACTION_BITS",
    "RESULT_BITS",
    "MODEL",
    "UNIT",
    "A_CHAIN_LAST",
    "B_CHAIN_LAST",
    "A_UNITS",
    "B_UNITS",
    "RAGGED_CHAIN",
    "FP8_BLOCKS",
    "ACCUMULATE",
    "IN_PARTS",
    "PLANE_PAIRS",
    "A_PLANES",
    "B_PLANES",
]);

/// An operand as the shader takes it.
struct Factor<'a> {
    elements: Cow<'a, Tensor>,
    gather: Option<&'a Tensor>,
    scale_inv: Option<&'a Tensor>,
    side: Side,
}

impl<'a> Factor<'a> {
    fn of(stream: &Stream, operand: Operand<'a>, side: Side) -> Result<Factor<'a>> {
        Ok(match operand {
            Operand::Plain { values, gather } => {
                Factor { elements: Cow::Borrowed(values), gather, scale_inv: None, side }
            }
            Operand::Mxfp8 { codes, scales, gather } => {
                let values = mxfp8_dequantize::run(stream, codes, scales, !side.chain_last)?;
                Factor { elements: Cow::Owned(values), gather, scale_inv: None, side }
            }
            Operand::Fp8Block { codes, scale_inv, gather } => {
                Factor { elements: Cow::Borrowed(codes), gather, scale_inv: Some(scale_inv), side: side.chain_last() }
            }
            Operand::Split { values } => {
                Factor { elements: Cow::Owned(split::run(stream, values)?), gather: None, scale_inv: None, side }
            }
        })
    }
}

pub(crate) fn run(stream: &Stream, op: &Checked<GroupedGemm<'_>>, model: NumericModel) -> Result<()> {
    let product = op.product();
    let Product { groups, m: rows, n: columns, k: chain, sides } = product;
    let wgrad = product.ragged_chain();
    let fp8 = matches!(op.a, Operand::Fp8Block { .. });
    let pairs = Split::pairs([op.a, op.b].map(|operand| matches!(operand, Operand::Split { .. })));
    let planes = |side: usize| pairs.iter().rev().fold(0, |planes, pair| planes << 4 | word(pair[side]));
    let a = Factor::of(stream, op.a, sides[0])?;
    let b = Factor::of(stream, op.b, sides[1])?;
    let unit = match a.elements.dtype() {
        DType::F32 => None,
        DType::Bf16 => Tensorcore::of_bf16(model),
        _ => Tensorcore::of_e4m3(model),
    };
    // A processor has no registers to run out of, and a large tile needs fewer loads. But it takes its time to compile,
    // so not for a model's logits alone.
    let logits = op.kind == GemmKind::Forward && op.out.dtype() == DType::F32;
    let tile = if stream.gpu.cpu && unit.is_some() && !logits { 8 } else { tile(unit) };
    let (a_strides, b_strides) = (a.side.strides(), b.side.strides());
    let column_tiles = columns.div_ceil(SIDE * tile);
    let row_tiles = rows.div_ceil(SIDE * tile);
    // The shader finds the group of each tile of rows.
    let row_tiles = if wgrad { groups * row_tiles } else { groups + row_tiles };
    let per_group = |extent: usize| if wgrad { 0 } else { word(extent) };

    let scalars = GemmScalars {
        groups: word(groups),
        rows: word(rows),
        columns: word(columns),
        chain: word(chain),
        column_tiles: word(column_tiles),
        out_group: if wgrad { word(rows) } else { 0 },
        a_row: word(a_strides[0]),
        a_chain: word(a_strides[1]),
        b_group: per_group(columns * chain),
        b_column: word(b_strides[0]),
        b_chain: word(b_strides[1]),
        scale_chain: word(chain.div_ceil(128)),
        a_gathered: u32::from(a.gather.is_some()),
        b_gathered: u32::from(b.gather.is_some()),
        a_sources: word(a.elements.rows()),
        b_sources: word(b.elements.rows()),
        offsets_end: word(product.ragged_extent()),
        offsets_block: word(op.offsets_block()),
        a_plane: word(sides[0].matrices * rows * chain),
        b_plane: word(sides[1].matrices * columns * chain),
    };
    let chains = Chains {
        dtype: a.elements.dtype(),
        unit,
        tile,
        chain_last: [a.side.chain_last, b.side.chain_last],
        // One of the strides is 1, the other a row.
        aligned: [(&a, a_strides), (&b, b_strides)].map(|(factor, [x, y])| aligned(&factor.elements, x.max(y))),
    };
    let mut constants = chains.constants();
    constants.extend([wgrad, fp8, op.accumulate, fp8 || pairs.len() > 1].map(u32::from));
    constants.extend([word(pairs.len()), planes(0), planes(1)]);
    let tensors = [
        Some(&*a.elements),
        // Drivers take their time to compile this shader, so it is the same with and without a gather.
        a.gather.or(Some(op.offsets)),
        a.scale_inv,
        Some(&*b.elements),
        b.gather.or(Some(op.offsets)),
        b.scale_inv,
        Some(op.offsets),
        Some(op.out),
    ];
    let constants = &constants[..];
    let workgroups = row_tiles * column_tiles;
    stream.dispatch(Dispatch { constants, ..Dispatch::new(&GROUPED_GEMM, scalars, &tensors, workgroups) })
}
