//! Gradient norm, AdamW, and the update of the selection bias.

use dropless_core::ops::{AdamW, BiasUpdate, ClipScale};
use dropless_core::{DType, Result};

use super::{RowWise, elements};
use crate::dispatch::{Stream, word};
use crate::shader::{Binding, F32, FORMATS, INTEGERS, PRELUDE, Shader, U32, params};

params!(
    /// `rest1`, `rest2`: 1 - beta. All but `elements` are the bits of f32.
    AdamWParams { elements, beta1, rest1, beta2, rest2, eps, decay }
);

pub(crate) static ADAMW: Shader = Shader {
    name: "adamw",
    files: &[PRELUDE, FORMATS, include_str!("../../../../shaders/adamw.wgsl")],
    params: AdamWParams::FIELDS,
    bindings: &[
        Binding::read("grad", F32),
        Binding::read("clip", F32),
        Binding::read("step", F32),
        Binding::in_place("param", F32),
        Binding::in_place("m", F32),
        Binding::in_place("v", F32),
        Binding::write("half", &[DType::Bf16]).optional(),
    ],
    constants: &[],
};

params!(
    /// `elements` is 1; `max_norm`: the bits of an f32.
    ClipScaleParams { elements, squares, max_norm }
);

pub(crate) static CLIP_SCALE: Shader = Shader {
    name: "clip_scale",
    files: &[PRELUDE, include_str!("../../../../shaders/clip_scale.wgsl")],
    params: ClipScaleParams::FIELDS,
    bindings: &[Binding::read("squares", F32), Binding::write("out", F32)],
    constants: &[],
};

params!(
    /// `elements`: the experts; `rate`: the bits of an f32.
    BiasUpdateParams { elements, parts, rate }
);

pub(crate) static BIAS_UPDATE: Shader = Shader {
    name: "bias_update",
    files: &[PRELUDE, INTEGERS, include_str!("../../../../shaders/bias_update.wgsl")],
    params: BiasUpdateParams::FIELDS,
    bindings: &[Binding::read("counts", U32), Binding::in_place("bias", F32)],
    constants: &[],
};

impl RowWise for AdamW<'_> {
    const SHADERS: &'static [&'static Shader] = &[&ADAMW];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.param.len();
        let params = AdamWParams {
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
            self.half,
        ];
        elements(stream, &ADAMW, &tensors, params.words(), count)
    }
}

impl RowWise for ClipScale<'_> {
    const SHADERS: &'static [&'static Shader] = &[&CLIP_SCALE];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let params =
            ClipScaleParams { elements: 1, squares: word(self.squares.len()), max_norm: self.max_norm.to_bits() };
        elements(stream, &CLIP_SCALE, &[Some(self.squares), Some(self.out)], params.words(), 1)
    }
}

impl RowWise for BiasUpdate<'_> {
    const SHADERS: &'static [&'static Shader] = &[&BIAS_UPDATE];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let experts = self.bias.len();
        let params =
            BiasUpdateParams { elements: word(experts), parts: word(self.counts.rows()), rate: self.rate.to_bits() };
        elements(stream, &BIAS_UPDATE, &[Some(self.counts), Some(self.bias)], params.words(), experts)
    }
}
