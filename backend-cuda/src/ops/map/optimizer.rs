//! Gradient norm, AdamW, and the update of the selection bias.

use std::sync::Arc;

use dropless_core::ops::{AdamW, BiasUpdate, ClipScale};
use dropless_core::{DType, Result};

use super::{RowWise, THREADS, elements, threads};
use crate::device::{Gpu, word};
use crate::kernel::{Binding, F32, Kernel, PRELUDE, RUNS, U32, params};

params!(
    /// `elements`: how many; `rest1`, `rest2`: 1 - beta. All but the first are the bits of f32.
    AdamWParams { elements, beta1, rest1, beta2, rest2, eps, decay }
);

/// Reads 16 bytes of each parameter and writes 12, and 2 more for the rounded weight.
pub(crate) static ADAMW: Kernel = Kernel {
    name: "adamw",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/adamw.cu")],
    params: AdamWParams::FIELDS,
    tensors: &[
        Binding::read("grad", F32),
        Binding::in_place("param", F32),
        Binding::in_place("m", F32),
        Binding::in_place("v", F32),
        Binding::write("half", &[DType::Bf16]).optional(),
        Binding::read("clip", F32),
        Binding::read("step", F32),
    ],
    maps: 0,
    constants: &[],
};

params!(
    /// `squares`: how many; `max_norm`: the bits of an f32.
    ClipScaleParams { squares, max_norm }
);

/// Adds one square after the other, as NUMERICS.md demands.
pub(crate) static CLIP_SCALE: Kernel = Kernel {
    name: "clip_scale",
    files: &[PRELUDE, include_str!("../../../../kernels/clip_scale.cu")],
    params: ClipScaleParams::FIELDS,
    tensors: &[Binding::read("squares", F32), Binding::write("out", F32)],
    maps: 0,
    constants: &[],
};

params!(
    /// Extents; `rate`: the bits of an f32.
    BiasUpdateParams { experts, parts, rate }
);

/// Each block of 128 experts reads all counts.
pub(crate) static BIAS_UPDATE: Kernel = Kernel {
    name: "bias_update",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/bias_update.cu")],
    params: BiasUpdateParams::FIELDS,
    tensors: &[Binding::read("counts", U32), Binding::in_place("bias", F32)],
    maps: 0,
    constants: &[],
};

impl RowWise for AdamW<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&ADAMW];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let params = |elements| AdamWParams {
            elements,
            beta1: self.beta1.to_bits(),
            rest1: (1.0 - self.beta1).to_bits(),
            beta2: self.beta2.to_bits(),
            rest2: (1.0 - self.beta2).to_bits(),
            eps: self.eps.to_bits(),
            decay: self.decay.to_bits(),
        };
        let flat = [Some(self.grad), Some(self.param), Some(self.m), Some(self.v), self.half];
        elements(gpu, &ADAMW, &flat, &[Some(self.clip), Some(self.step)], |count| params(count).words())
    }
}

impl RowWise for ClipScale<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&CLIP_SCALE];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let params = ClipScaleParams { squares: word(self.squares.len()), max_norm: self.max_norm.to_bits() };
        threads(gpu, &CLIP_SCALE, &[Some(self.squares), Some(self.out)], params.words(), THREADS as usize)
    }
}

impl RowWise for BiasUpdate<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&BIAS_UPDATE];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let experts = self.bias.len();
        let params =
            BiasUpdateParams { experts: word(experts), parts: word(self.counts.rows()), rate: self.rate.to_bits() };
        threads(gpu, &BIAS_UPDATE, &[Some(self.counts), Some(self.bias)], params.words(), experts)
    }
}
