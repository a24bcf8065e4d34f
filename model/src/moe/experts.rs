//! The experts of a rank: two grouped products around a SwiGLU, under a precision recipe. NUMERICS.md,
//! "Mixture-of-Experts layer".
//!
//! Products gather their rows while they load them. Quantized products need blocks along each product's chain: activations
//! and gradients row-wise for the product along columns, and column-wise (blocks along the rows of an expert) for the weight
//! gradients, both quantized from the unquantized values. A row's own blocks are the same for all its experts, so that rows
//! are quantized before they are gathered; those along the rows of an expert are gathered by the quantization.

use super::dispatch::Placement;
use super::{Moe, MoeExperts};
use crate::nn::{MlpSaved, Weight};
use dropless_core::Backend;
use dropless_core::Result;
use dropless_core::ops::{
    BlockFormat, ColumnBlocks, GemmKind, GroupQuantize, GroupedGemm, Operand, RowBlocks, Swiglu, SwigluGrad,
};
use dropless_core::{DType, Memory, Tensor};

/// Arithmetic of the expert products. Everything else is f32 under `F32` and bf16 under the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
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
    /// Every recipe.
    pub const ALL: [Recipe; 4] = [Recipe::F32, Recipe::Bf16, Recipe::Mxfp8, Recipe::Fp8Block];

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

    /// Bytes of the codes and scales that a backward pass over `slots` slots of `rows` rows holds: along the columns, of the
    /// rows of gradients and the slots of d(gate and up); along the rows of a group, padded, of the slots of these, of hidden
    /// values and of inputs.
    pub(super) fn code_bytes(self, rows: usize, slots: usize, groups: usize, h: usize, i: usize) -> usize {
        let Some(format) = self.format() else { return 0 };
        let padded = GroupQuantize::padded_rows(format, slots, groups);
        let codes = rows * h + slots * 2 * i + padded * (2 * h + 3 * i);
        // A byte for 32 codes, or four for 128.
        codes + codes.div_ceil(32)
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

    fn operand<'a>(&'a self, gather: Option<&'a Tensor>) -> Operand<'a> {
        let (codes, scales) = (&self.codes, &self.scales);
        match scales.dtype() {
            DType::Ue8m0 => Operand::Mxfp8 { codes, scales, gather },
            _ => Operand::Fp8Block { codes, scale_inv: scales, gather },
        }
    }

    fn rows(&self) -> RowBlocks<'_> {
        RowBlocks { codes: &self.codes, scales: &self.scales }
    }

    fn columns<'a>(&'a self, offsets: Option<&'a Tensor>) -> ColumnBlocks<'a> {
        ColumnBlocks { codes: &self.codes, scales: &self.scales, offsets }
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
        self.quantized.as_ref().map_or(Operand::plain(&self.plain), |(row, _)| row.operand(None))
    }

    fn dgrad(&self) -> Operand<'_> {
        self.quantized.as_ref().map_or(Operand::plain(&self.plain), |(_, column)| column.operand(None))
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
        gather: None,
        offsets: None,
        format,
        square,
        row: Some(row.rows()),
        column: Some(column.columns(None)),
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
        let (sources, cols, block) = (values.rows(), values.cols(), format.block());
        let row = if uses.along_columns {
            Some(Blocks::alloc(backend, format, &[sources, cols], &[sources, cols.div_ceil(block)])?)
        } else {
            None
        };
        let column = if uses.along_rows {
            let padded = GroupQuantize::padded_rows(format, gather.map_or(sources, Tensor::len), offsets.len() - 1);
            let turned = matches!(format, BlockFormat::Fp8Block { .. });
            let codes = if turned { [cols, padded] } else { [padded, cols] };
            let blocks = Blocks::alloc(backend, format, &codes, &[padded / block, cols])?;
            Some((blocks, backend.alloc(DType::U32, &[offsets.len()], Memory::Device)?))
        } else {
            None
        };
        let quantize = GroupQuantize {
            x: values,
            gather,
            offsets: Some(offsets),
            format,
            square: false,
            row: row.as_ref().map(Blocks::rows).filter(|_| gather.is_none()),
            column: column.as_ref().map(|(blocks, padded)| blocks.columns(Some(padded))),
            amax: None,
        };
        if let (Some(row), Some(_)) = (&row, gather) {
            let x = values.reshape(&[1, sources, cols])?;
            let Blocks { codes, scales } = row;
            let (codes, scales) = (codes.reshape(x.shape())?, scales.reshape(&[1, sources, cols.div_ceil(block)])?);
            let row = Some(RowBlocks { codes: &codes, scales: &scales });
            GroupQuantize { x: &x, gather: None, offsets: None, row, column: None, ..quantize }.run(backend)?;
        }
        if quantize.row.is_some() || quantize.column.is_some() {
            quantize.run(backend)?;
        }
        Ok(SlotRows { values, gather, row, column })
    }

    fn plain(&self) -> Operand<'_> {
        Operand::Plain { values: self.values, gather: self.gather }
    }

    /// The operand of a product along the columns.
    fn row(&self) -> Operand<'_> {
        self.row.as_ref().map_or(self.plain(), |row| row.operand(self.gather))
    }

    /// The operand of a weight gradient, with the offsets that belong to it.
    fn column<'b>(&'b self, offsets: &'b Tensor) -> (Operand<'b>, &'b Tensor) {
        self.column.as_ref().map_or((self.plain(), offsets), |(blocks, padded)| (blocks.operand(None), padded))
    }
}

/// The experts at work on the rows of one chunk.
pub(super) struct Slots<'a> {
    pub(super) backend: &'a dyn Backend,
    pub(super) moe: &'a Moe,
    pub(super) experts: &'a MoeExperts,
    /// The received rows, which the slots index.
    pub(super) rows: &'a Tensor,
    pub(super) placement: &'a Placement,
    /// The part of the weights' gradients that these rows belong to.
    pub(super) expert_shard: usize,
}

/// Gradients for each slot.
pub(super) struct SlotGrads {
    /// Of the received row, `[slots, h]`.
    pub(super) d_rows: Tensor,
    /// Of the weight, f32 `[slots]`.
    pub(super) d_weight: Tensor,
}

impl Slots<'_> {
    fn alloc(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.backend.alloc(dtype, shape, Memory::Device)
    }

    /// A value of each slot, or of the row that `gather` names for each slot, for some products.
    fn operands<'b>(&self, values: &'b Tensor, gather: Option<&'b Tensor>, uses: Uses) -> Result<SlotRows<'b>> {
        SlotRows::new(self.backend, self.moe.recipe, values, gather, &self.placement.offsets, uses)
    }

    /// `[slots, cols]` in the type of the activations.
    fn product(&self, kind: GemmKind, a: Operand<'_>, b: Operand<'_>, cols: usize) -> Result<Tensor> {
        let out = self.alloc(self.rows.dtype(), &[self.placement.slot_rows.len(), cols])?;
        GroupedGemm { kind, a, b, offsets: &self.placement.offsets, out: &out, accumulate: false }.run(self.backend)?;
        Ok(out)
    }

    fn weight_gradient(&self, dy: &SlotRows<'_>, x: &SlotRows<'_>, weight: &Weight) -> Result<()> {
        let (a, padded) = dy.column(&self.placement.offsets);
        let (b, _) = x.column(&self.placement.offsets);
        let (kind, offsets, out) = (GemmKind::Wgrad, padded, weight.grad()?.index(self.expert_shard)?);
        GroupedGemm { kind, a, b, offsets, out: &out, accumulate: true }.run(self.backend)
    }

    /// Number of slots that count: the last offset.
    fn limit(&self) -> Result<Tensor> {
        let groups = self.placement.offsets.len() - 1;
        self.placement.offsets.slice(groups, groups + 1)
    }

    fn gate_up(&self, saved: &mut MlpSaved) -> Result<Tensor> {
        if let Some(gate_up) = saved.gate_up.load(self.backend)? {
            return Ok(gate_up);
        }
        let x = self.operands(self.rows, Some(&self.placement.slot_rows), FORWARD)?;
        let w = &self.experts.gate_up;
        Ok(saved.gate_up.set(self.product(GemmKind::Forward, x.row(), w.forward(), w.n())?))
    }

    fn hidden(&self, saved: &mut MlpSaved) -> Result<Tensor> {
        if let Some(hidden) = saved.hidden.load(self.backend)? {
            return Ok(hidden);
        }
        let gate_up = self.gate_up(saved)?;
        let hidden = self.alloc(gate_up.dtype(), &[gate_up.rows(), gate_up.cols() / 2])?;
        let (weight, limit) = (&self.placement.slot_weights, self.limit()?);
        Swiglu { gate_up: &gate_up, weight: Some(weight), limit: Some(&limit), out: &hidden }.run(self.backend)?;
        Ok(saved.hidden.set(hidden))
    }

    /// The experts' results for each slot, `[slots, h]`.
    pub(super) fn forward(&self, saved: &mut MlpSaved) -> Result<Tensor> {
        let hidden = self.hidden(saved)?;
        let h = self.operands(&hidden, None, FORWARD)?;
        let w = &self.experts.down;
        self.product(GemmKind::Forward, h.row(), w.forward(), w.n())
    }

    /// The gradients for `dy`, the received rows of the result's gradient; adds to the weights' gradients.
    pub(super) fn backward(&self, dy: &Tensor, mut saved: MlpSaved) -> Result<SlotGrads> {
        let placement = self.placement;
        let gather = Some(&placement.slot_rows);
        let gate_up = self.gate_up(&mut saved)?;
        let hidden = self.hidden(&mut saved)?;

        let dy = self.operands(dy, gather, BOTH)?;
        let h = self.operands(&hidden, None, WGRAD)?;
        self.weight_gradient(&dy, &h, &self.moe.down)?;
        let w = &self.experts.down;
        let d_hidden = self.product(GemmKind::Dgrad, dy.row(), w.dgrad(), w.k())?;

        let d_gate_up = self.alloc(gate_up.dtype(), gate_up.shape())?;
        let d_weight = self.alloc(DType::F32, &[placement.slot_rows.len()])?;
        SwigluGrad {
            gate_up: &gate_up,
            weight: Some(&placement.slot_weights),
            limit: Some(&self.limit()?),
            d_out: &d_hidden,
            d_gate_up: &d_gate_up,
            d_weight: Some(&d_weight),
        }
        .run(self.backend)?;

        let d_gate_up = self.operands(&d_gate_up, None, BOTH)?;
        let x = self.operands(self.rows, gather, WGRAD)?;
        self.weight_gradient(&d_gate_up, &x, &self.moe.gate_up)?;
        let w = &self.experts.gate_up;
        let d_rows = self.product(GemmKind::Dgrad, d_gate_up.row(), w.dgrad(), w.k())?;
        Ok(SlotGrads { d_rows, d_weight })
    }
}
