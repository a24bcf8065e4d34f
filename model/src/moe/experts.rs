//! The experts of a rank: two grouped products around a SwiGLU, under a precision recipe. NUMERICS.md,
//! "Mixture-of-Experts layer".
//!
//! Products gather their rows while they load them. Quantized ones take rows and weights as `nn::quantized` makes them; the
//! groups of rows are the experts.

use super::dispatch::Placement;
use super::{Moe, MoeExperts};
use crate::nn::quantized::{BOTH, FORWARD, FP8_BLOCK, MXFP8, Rows, Uses, WGRAD};
use crate::nn::{MlpSaved, Weight};
use dropless_core::Backend;
use dropless_core::Result;
use dropless_core::ops::{BlockFormat, GemmKind, GroupQuantize, GroupedGemm, Operand, Swiglu, SwigluGrad};
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

    pub(super) fn format(self) -> Option<BlockFormat> {
        match self {
            Recipe::F32 | Recipe::Bf16 => None,
            Recipe::Mxfp8 => Some(MXFP8),
            Recipe::Fp8Block => Some(FP8_BLOCK),
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
    fn operands<'b>(&self, values: &'b Tensor, gather: Option<&'b Tensor>, uses: Uses) -> Result<Rows<'b>> {
        Rows::new(self.backend, self.moe.recipe.format(), values, gather, &self.placement.offsets, uses)
    }

    /// `[slots, cols]` in the type of the activations.
    fn product(&self, kind: GemmKind, a: Operand<'_>, b: Operand<'_>, cols: usize) -> Result<Tensor> {
        let out = self.alloc(self.rows.dtype(), &[self.placement.slot_rows.len(), cols])?;
        GroupedGemm { kind, a, b, offsets: &self.placement.offsets, out: &out, accumulate: false }.run(self.backend)?;
        Ok(out)
    }

    fn weight_gradient(&self, dy: &Rows<'_>, x: &Rows<'_>, weight: &Weight) -> Result<()> {
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
