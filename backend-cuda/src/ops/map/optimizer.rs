//! Gradient norm, AdamW, and the update of the selection bias.

use std::sync::Arc;

use dropless_core::launch::Program;
use dropless_core::ops::{AdamW, BiasUpdate, ClipScale};
use dropless_core::{DType, Result};

use super::{RowWise, THREADS, elements, threads};
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
        Binding::write("param_bf16", &[DType::Bf16]).optional(),
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

impl RowWise for AdamW<'_> {
    const KERNELS: &'static [&'static Program] = &[&ADAMW.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let scalars = |elements| AdamWScalars {
            elements,
            beta1: self.beta1.to_bits(),
            rest1: (1.0 - self.beta1).to_bits(),
            beta2: self.beta2.to_bits(),
            rest2: (1.0 - self.beta2).to_bits(),
            eps: self.eps.to_bits(),
            decay: self.decay.to_bits(),
        };
        let flat = [Some(self.grad), Some(self.param), Some(self.m), Some(self.v), self.param_bf16];
        elements(gpu, &ADAMW, &flat, &[Some(self.clip), Some(self.step)], scalars)
    }
}

impl RowWise for ClipScale<'_> {
    const KERNELS: &'static [&'static Program] = &[&CLIP_SCALE.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let scalars = ClipScaleScalars { squares: word(self.squares.len()), max_norm: self.max_norm.to_bits() };
        threads(gpu, &CLIP_SCALE, &[Some(self.squares), Some(self.out)], scalars, THREADS as usize)
    }
}

impl RowWise for BiasUpdate<'_> {
    const KERNELS: &'static [&'static Program] = &[&BIAS_UPDATE.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let experts = self.bias.len();
        let scalars =
            BiasUpdateScalars { experts: word(experts), parts: word(self.counts.rows()), rate: self.rate.to_bits() };
        threads(gpu, &BIAS_UPDATE, &[Some(self.counts), Some(self.bias)], scalars, experts)
    }
}
