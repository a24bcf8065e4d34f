//! Gradient norm, AdamW, and the update of the selection bias.

use std::sync::Arc;

use dropless_core::ops::{AdamW, BiasUpdate, ClipScale};
use dropless_core::{DType, Result};

use super::{THREADS, elements, threads};
use crate::device::Gpu;
use crate::kernel::{Binding, F32, Kernel, PRELUDE, RUNS, U32, scalars, word};

scalars!(
    /// `elements`: how many; `rest1`, `rest2`: 1 - beta. All but the first are the bits of f32.
    pub(crate) struct AdamWScalars { elements, beta1, rest1, beta2, rest2, eps, decay }
);

/// Reads 16 bytes of each parameter and writes 12, and 2 more for the rounded weight.
pub(crate) static ADAMW: Kernel<AdamWScalars> = Kernel::new(
    "adamw",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/adamw.cu")],
    &[
        Binding::read("grad", F32),
        Binding::in_place("param", F32),
        Binding::in_place("m", F32),
        Binding::in_place("v", F32),
        Binding::write("half", &[DType::Bf16]).optional(),
        Binding::read("clip", F32),
        Binding::read("step", F32),
    ],
);

scalars!(
    /// `squares`: how many; `max_norm`: the bits of an f32.
    pub(crate) struct ClipScaleScalars { squares, max_norm }
);

/// Adds one square after the other, as NUMERICS.md demands.
pub(crate) static CLIP_SCALE: Kernel<ClipScaleScalars> = Kernel::new(
    "clip_scale",
    &[PRELUDE, include_str!("../../../../kernels/clip_scale.cu")],
    &[Binding::read("squares", F32), Binding::write("out", F32)],
);

scalars!(
    /// Extents; `rate`: the bits of an f32.
    pub(crate) struct BiasUpdateScalars { experts, parts, rate }
);

/// Each block of 128 experts reads all counts.
pub(crate) static BIAS_UPDATE: Kernel<BiasUpdateScalars> = Kernel::new(
    "bias_update",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/bias_update.cu")],
    &[Binding::read("counts", U32), Binding::in_place("bias", F32)],
);

pub(super) fn adamw(gpu: &Arc<Gpu>, op: &AdamW<'_>) -> Result<()> {
    let scalars = |elements| AdamWScalars {
        elements,
        beta1: op.beta1.to_bits(),
        rest1: (1.0 - op.beta1).to_bits(),
        beta2: op.beta2.to_bits(),
        rest2: (1.0 - op.beta2).to_bits(),
        eps: op.eps.to_bits(),
        decay: op.decay.to_bits(),
    };
    let flat = [Some(op.grad), Some(op.param), Some(op.m), Some(op.v), op.half];
    elements(gpu, &ADAMW, &flat, &[Some(op.clip), Some(op.step)], scalars)
}

pub(super) fn clip_scale(gpu: &Arc<Gpu>, op: &ClipScale<'_>) -> Result<()> {
    let scalars = ClipScaleScalars { squares: word(op.squares.len()), max_norm: op.max_norm.to_bits() };
    threads(gpu, &CLIP_SCALE, &[Some(op.squares), Some(op.out)], scalars, THREADS as usize)
}

pub(super) fn bias_update(gpu: &Arc<Gpu>, op: &BiasUpdate<'_>) -> Result<()> {
    let experts = op.bias.len();
    let scalars = BiasUpdateScalars { experts: word(experts), parts: word(op.counts.rows()), rate: op.rate.to_bits() };
    threads(gpu, &BIAS_UPDATE, &[Some(op.counts), Some(op.bias)], scalars, experts)
}
