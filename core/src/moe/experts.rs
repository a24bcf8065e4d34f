//! The experts of a rank: two grouped products around a SwiGLU, under a precision recipe. NUMERICS.md,
//! "Mixture-of-Experts layer".
//!
//! bf16 and f32 products gather their rows while they load them. Quantized products need blocks along each product's
//! chain: activations and gradients row-wise for the product along columns, and column-wise (blocks along the rows of an
//! expert) for the weight gradients, both quantized from the unquantized values.

use super::dispatch::Route;
use super::{Moe, MoeExperts};
use crate::backend::Backend;
use crate::error::Result;
use crate::nn::MlpSaved;
use crate::ops::{
    BlockFormat, ColumnBlocks, GatherRows, GemmKind, GroupQuantize, GroupedGemm, Operand, RowBlocks, Swiglu, SwigluGrad,
};
use crate::tensor::{DType, Memory, Tensor};

/// Arithmetic of the expert products. Everything else is f32 under `F32` and bf16 under the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recipe {
    /// f32 throughout.
    F32,
    /// bf16 operands, f32 accumulation.
    Bf16,
    /// Blocks of 32 e4m3 elements with power-of-two scales.
    Mxfp8,
    /// e4m3 in 1x128 blocks (activations, gradients) and 128x128 blocks (weights), power-of-two scales.
    Fp8Block,
}

impl Recipe {
    /// Element type of activations and of the weights in products.
    pub fn element(self) -> DType {
        if self == Recipe::F32 { DType::F32 } else { DType::Bf16 }
    }

    fn format(self) -> Option<BlockFormat> {
        match self {
            Recipe::F32 | Recipe::Bf16 => None,
            Recipe::Mxfp8 => Some(BlockFormat::Mxfp8 { floor: false }),
            Recipe::Fp8Block => Some(BlockFormat::Fp8Block { f32_scale: false }),
        }
    }
}

/// Codes and scales.
#[derive(Clone, Debug)]
struct Blocks {
    codes: Tensor,
    scales: Tensor,
}

impl Blocks {
    fn alloc(backend: &dyn Backend, format: BlockFormat, codes: &[usize], scales: &[usize]) -> Result<Blocks> {
        let scale = if matches!(format, BlockFormat::Mxfp8 { .. }) { DType::Ue8m0 } else { DType::F32 };
        Ok(Blocks {
            codes: backend.alloc(DType::E4m3, codes, Memory::Device)?,
            scales: backend.alloc(scale, scales, Memory::Device)?,
        })
    }

    fn operand(&self) -> Operand<'_> {
        let (codes, scales) = (&self.codes, &self.scales);
        match scales.dtype() {
            DType::Ue8m0 => Operand::Mxfp8 { codes, scales },
            _ => Operand::Fp8Block { codes, scale_inv: scales },
        }
    }
}

/// A stack of expert matrices `[local experts, n, k]` in the form of the recipe's products.
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    plain: Tensor,
    /// Blocks along k (forward) and along n (gradient of the input).
    quantized: Option<(Blocks, Blocks)>,
}

impl ExpertWeights {
    pub(super) fn prepare(backend: &dyn Backend, recipe: Recipe, weights: &Tensor) -> Result<ExpertWeights> {
        let quantized = match recipe.format() {
            None => None,
            Some(format) => Some(quantize_weights(backend, format, weights)?),
        };
        Ok(ExpertWeights { plain: weights.clone(), quantized })
    }

    fn forward(&self) -> Operand<'_> {
        self.quantized.as_ref().map_or(Operand::plain(&self.plain), |(row, _)| row.operand())
    }

    fn dgrad(&self) -> Operand<'_> {
        self.quantized.as_ref().map_or(Operand::plain(&self.plain), |(_, column)| column.operand())
    }

    fn n(&self) -> usize {
        self.plain.shape()[1]
    }

    fn k(&self) -> usize {
        self.plain.shape()[2]
    }
}

fn quantize_weights(backend: &dyn Backend, format: BlockFormat, weights: &Tensor) -> Result<(Blocks, Blocks)> {
    let [groups, n, k] = [0, 1, 2].map(|d| weights.shape()[d]);
    let square = matches!(format, BlockFormat::Fp8Block { .. });
    let (row, column) = if square {
        let blocks = |len: usize| len.div_ceil(128);
        (
            Blocks::alloc(backend, format, &[groups, n, k], &[groups, blocks(n), blocks(k)])?,
            Blocks::alloc(backend, format, &[groups, k, n], &[groups, blocks(k), blocks(n)])?,
        )
    } else {
        (
            Blocks::alloc(backend, format, &[groups, n, k], &[groups, n, k / 32])?,
            Blocks::alloc(backend, format, &[groups, n, k], &[groups, n / 32, k])?,
        )
    };
    GroupQuantize {
        x: weights,
        offsets: None,
        format,
        square,
        row: Some(RowBlocks { codes: &row.codes, scales: &row.scales }),
        column: Some(ColumnBlocks { codes: &column.codes, scales: &column.scales, offsets: None }),
        amax: None,
    }
    .run(backend)?;
    Ok((row, column))
}

/// Slot rows as operands of a recipe's products: gathered on the fly, or quantized for the uses that were asked for.
struct SlotRows<'a> {
    values: &'a Tensor,
    gather: Option<&'a Tensor>,
    row: Option<Blocks>,
    /// With the offsets of the padded groups.
    column: Option<(Blocks, Tensor)>,
}

/// Which products an operand takes part in.
#[derive(Clone, Copy, PartialEq)]
struct Uses {
    along_columns: bool,
    along_rows: bool,
}

const FORWARD: Uses = Uses { along_columns: true, along_rows: false };
const WGRAD: Uses = Uses { along_columns: false, along_rows: true };
const BOTH: Uses = Uses { along_columns: true, along_rows: true };

impl<'a> SlotRows<'a> {
    fn new(
        backend: &dyn Backend,
        recipe: Recipe,
        values: &'a Tensor,
        gather: Option<&'a Tensor>,
        offsets: &Tensor,
        uses: Uses,
    ) -> Result<SlotRows<'a>> {
        let Some(format) = recipe.format() else {
            return Ok(SlotRows { values, gather, row: None, column: None });
        };
        let gathered;
        let x = match gather {
            None => values,
            Some(index) => {
                gathered = backend.alloc(values.dtype(), &[index.len(), values.cols()], Memory::Device)?;
                GatherRows { x: values, index, out: &gathered }.run(backend)?;
                &gathered
            }
        };
        let (rows, cols) = (x.rows(), x.cols());
        let block = format.block();
        let row = if uses.along_columns {
            Some(Blocks::alloc(backend, format, &[rows, cols], &[rows, cols.div_ceil(block)])?)
        } else {
            None
        };
        let column = if uses.along_rows {
            let padded = GroupQuantize::padded_rows(format, rows, offsets.len() - 1);
            let blocks = if matches!(format, BlockFormat::Fp8Block { .. }) {
                Blocks::alloc(backend, format, &[cols, padded], &[cols, padded / block])?
            } else {
                Blocks::alloc(backend, format, &[padded, cols], &[padded / block, cols])?
            };
            Some((blocks, backend.alloc(DType::U32, &[offsets.len()], Memory::Device)?))
        } else {
            None
        };
        GroupQuantize {
            x,
            offsets: Some(offsets),
            format,
            square: false,
            row: row.as_ref().map(|b| RowBlocks { codes: &b.codes, scales: &b.scales }),
            column: column.as_ref().map(|(b, offsets)| ColumnBlocks {
                codes: &b.codes,
                scales: &b.scales,
                offsets: Some(offsets),
            }),
            amax: None,
        }
        .run(backend)?;
        Ok(SlotRows { values, gather, row, column })
    }

    fn plain(&self) -> Operand<'_> {
        Operand::Plain { values: self.values, gather: self.gather }
    }

    /// The operand of a product along the columns.
    fn row(&self) -> Operand<'_> {
        self.row.as_ref().map_or(self.plain(), Blocks::operand)
    }

    /// The operand of a weight gradient, with the offsets that belong to it.
    fn column<'b>(&'b self, offsets: &'b Tensor) -> (Operand<'b>, &'b Tensor) {
        self.column.as_ref().map_or((self.plain(), offsets), |(blocks, padded)| (blocks.operand(), padded))
    }
}

fn product(
    backend: &dyn Backend,
    kind: GemmKind,
    a: Operand<'_>,
    b: Operand<'_>,
    route: &Route,
    cols: usize,
    dtype: DType,
) -> Result<Tensor> {
    let out = backend.alloc(dtype, &[route.slot_rows.len(), cols], Memory::Device)?;
    GroupedGemm { kind, a, b, offsets: &route.offsets, out: &out, accumulate: false }.run(backend)?;
    Ok(out)
}

fn weight_gradient(
    backend: &dyn Backend,
    dy: &SlotRows<'_>,
    x: &SlotRows<'_>,
    offsets: &Tensor,
    grad: &Tensor,
) -> Result<()> {
    let (a, padded) = dy.column(offsets);
    let (b, _) = x.column(offsets);
    GroupedGemm { kind: GemmKind::Wgrad, a, b, offsets: padded, out: grad, accumulate: true }.run(backend)
}

/// Number of slots that count: the last offset.
fn limit(route: &Route) -> Result<Tensor> {
    let groups = route.offsets.len() - 1;
    route.offsets.slice(groups, groups + 1)
}

fn gate_up(
    backend: &dyn Backend,
    moe: &Moe,
    experts: &MoeExperts,
    rows: &Tensor,
    route: &Route,
    saved: &mut MlpSaved,
) -> Result<Tensor> {
    if let Some(gate_up) = saved.gate_up.load(backend)? {
        return Ok(gate_up);
    }
    let x = SlotRows::new(backend, moe.recipe, rows, Some(&route.slot_rows), &route.offsets, FORWARD)?;
    let w = &experts.gate_up;
    let y = product(backend, GemmKind::Forward, x.row(), w.forward(), route, w.n(), rows.dtype())?;
    Ok(saved.gate_up.set(y))
}

fn hidden(
    backend: &dyn Backend,
    moe: &Moe,
    experts: &MoeExperts,
    rows: &Tensor,
    route: &Route,
    saved: &mut MlpSaved,
) -> Result<Tensor> {
    if let Some(hidden) = saved.hidden.load(backend)? {
        return Ok(hidden);
    }
    let gate_up = gate_up(backend, moe, experts, rows, route, saved)?;
    let hidden = backend.alloc(rows.dtype(), &[gate_up.rows(), gate_up.cols() / 2], Memory::Device)?;
    let limit = limit(route)?;
    Swiglu { gate_up: &gate_up, weight: Some(&route.slot_weights), limit: Some(&limit), out: &hidden }.run(backend)?;
    Ok(saved.hidden.set(hidden))
}

/// The experts' results for each slot, `[slots, h]`, from the received rows.
pub(super) fn forward(
    backend: &dyn Backend,
    moe: &Moe,
    experts: &MoeExperts,
    rows: &Tensor,
    route: &Route,
    saved: &mut MlpSaved,
) -> Result<Tensor> {
    let hidden = hidden(backend, moe, experts, rows, route, saved)?;
    let h = SlotRows::new(backend, moe.recipe, &hidden, None, &route.offsets, FORWARD)?;
    let w = &experts.down;
    product(backend, GemmKind::Forward, h.row(), w.forward(), route, w.n(), rows.dtype())
}

/// Gradients for each slot.
pub(super) struct SlotGrads {
    /// Of the received row, `[slots, h]`.
    pub(super) d_rows: Tensor,
    /// Of the weight, f32 `[slots]`.
    pub(super) d_weight: Tensor,
}

/// The gradients for `dy_rows`, the received rows of the result's gradient; adds to the weights' gradients.
pub(super) fn backward(
    backend: &dyn Backend,
    moe: &Moe,
    experts: &MoeExperts,
    rows: &Tensor,
    dy_rows: &Tensor,
    route: &Route,
    mut saved: MlpSaved,
) -> Result<SlotGrads> {
    let recipe = moe.recipe;
    let (offsets, gather) = (&route.offsets, Some(&route.slot_rows));
    let gate_up = gate_up(backend, moe, experts, rows, route, &mut saved)?;
    let hidden = hidden(backend, moe, experts, rows, route, &mut saved)?;

    let dy = SlotRows::new(backend, recipe, dy_rows, gather, offsets, BOTH)?;
    let h = SlotRows::new(backend, recipe, &hidden, None, offsets, WGRAD)?;
    weight_gradient(backend, &dy, &h, offsets, &moe.down.grad)?;
    let w = &experts.down;
    let d_hidden = product(backend, GemmKind::Dgrad, dy.row(), w.dgrad(), route, w.k(), rows.dtype())?;

    let d_gate_up = backend.alloc(rows.dtype(), gate_up.shape(), Memory::Device)?;
    let d_weight = backend.alloc(DType::F32, &[route.slot_rows.len()], Memory::Device)?;
    SwigluGrad {
        gate_up: &gate_up,
        weight: Some(&route.slot_weights),
        limit: Some(&limit(route)?),
        d_out: &d_hidden,
        d_gate_up: &d_gate_up,
        d_weight: Some(&d_weight),
    }
    .run(backend)?;

    let d_gate_up = SlotRows::new(backend, recipe, &d_gate_up, None, offsets, BOTH)?;
    let x = SlotRows::new(backend, recipe, rows, gather, offsets, WGRAD)?;
    weight_gradient(backend, &d_gate_up, &x, offsets, &moe.gate_up.grad)?;
    let w = &experts.gate_up;
    let d_rows = product(backend, GemmKind::Dgrad, d_gate_up.row(), w.dgrad(), route, w.k(), rows.dtype())?;
    Ok(SlotGrads { d_rows, d_weight })
}
