//! Gradient norm, AdamW, and the update of the selection bias.

use dropless_core::launch::Program;
use dropless_core::ops::{AdamW, BiasUpdate, ClipScale};
use dropless_core::{DType, Result};

use super::{RowWise, elements};
use crate::dispatch::Stream;
use crate::shader::{Binding, F32, FORMATS, INTEGERS, PRELUDE, Shader, U32, scalars, word};

scalars!(
    /// `rest1`, `rest2`: 1 - beta. All but `elements` are the bits of f32.
    pub(crate) struct AdamWScalars { elements, beta1, rest1, beta2, rest2, eps, decay }
);

pub(crate) static ADAMW: Shader<AdamWScalars> = Shader::new(
    "adamw",
    &[PRELUDE, FORMATS, include_str!("../../../../shaders/adamw.wgsl")],
    &[
        Binding::read("grad", F32),
        Binding::read("clip", F32),
        Binding::read("step", F32),
        Binding::in_place("param", F32),
        Binding::in_place("m", F32),
        Binding::in_place("v", F32),
        Binding::write("param_bf16", &[DType::Bf16]).optional(),
    ],
);

scalars!(
    /// `elements` is 1; `max_norm`: the bits of an f32.
    pub(crate) struct ClipScaleScalars { elements, squares, max_norm }
);

pub(crate) static CLIP_SCALE: Shader<ClipScaleScalars> = Shader::new(
    "clip_scale",
    &[PRELUDE, include_str!("../../../../shaders/clip_scale.wgsl")],
    &[Binding::read("squares", F32), Binding::write("out", F32)],
);

scalars!(
    /// `elements`: the experts; `rate`: the bits of an f32.
    pub(crate) struct BiasUpdateScalars { elements, parts, rate }
);

pub(crate) static BIAS_UPDATE: Shader<BiasUpdateScalars> = Shader::new(
    "bias_update",
    &[PRELUDE, INTEGERS, include_str!("../../../../shaders/bias_update.wgsl")],
    &[Binding::read("counts", U32), Binding::in_place("bias", F32)],
);

impl RowWise for AdamW<'_> {
    const SHADERS: &'static [&'static Program] = &[&ADAMW.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.param.len();
        let scalars = AdamWScalars {
            elements: word(count),
            beta1: self.beta1.to_bits(),
            rest1: (1.0 - self.beta1).to_bits(),
            beta2: self.beta2.to_bits(),
            rest2: (1.0 - self.beta2).to_bits(),
            eps: self.eps.to_bits(),
            decay: self.decay.to_bits(),
        };
        let tensors = [
            Some(self.grad),
            Some(self.clip),
            Some(self.step),
            Some(self.param),
            Some(self.m),
            Some(self.v),
            self.param_bf16,
        ];
        elements(stream, &ADAMW, &tensors, scalars, count)
    }
}

impl RowWise for ClipScale<'_> {
    const SHADERS: &'static [&'static Program] = &[&CLIP_SCALE.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let scalars =
            ClipScaleScalars { elements: 1, squares: word(self.squares.len()), max_norm: self.max_norm.to_bits() };
        elements(stream, &CLIP_SCALE, &[Some(self.squares), Some(self.out)], scalars, 1)
    }
}

impl RowWise for BiasUpdate<'_> {
    const SHADERS: &'static [&'static Program] = &[&BIAS_UPDATE.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let experts = self.bias.len();
        let scalars =
            BiasUpdateScalars { elements: word(experts), parts: word(self.counts.rows()), rate: self.rate.to_bits() };
        elements(stream, &BIAS_UPDATE, &[Some(self.counts), Some(self.bias)], scalars, experts)
    }
}
