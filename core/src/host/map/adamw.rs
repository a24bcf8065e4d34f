//! AdamW over flat runs of parameters.

use rayon::prelude::*;

use super::{Fast, Simd, TILE};
use crate::error::Result;
use crate::host::memory::{self, FloatsMut};
use crate::host::simd;
use crate::ops::AdamW;

impl Fast for AdamW<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        const OP: &str = AdamW::OP;
        let (grad, clip, step) =
            (memory::input(OP, self.grad)?, memory::input(OP, self.clip)?, memory::input(OP, self.step)?);
        let (mut param, mut m, mut v) =
            (memory::output(OP, self.param)?, memory::output(OP, self.m)?, memory::output(OP, self.v)?);
        let mut param_bf16 = memory::output_opt(OP, self.param_bf16)?;
        let step = [step.f32()[0], step.f32()[1], step.f32()[2]];
        let clip = clip.f32()[1];
        let grad = grad.f32();
        let tiles = (
            grad.par_chunks(TILE),
            param.f32().par_chunks_mut(TILE),
            m.f32().par_chunks_mut(TILE),
            v.f32().par_chunks_mut(TILE),
        )
            .into_par_iter();
        match &mut param_bf16 {
            None => tiles.for_each(|(grad, param, m, v)| {
                simd::with(
                    simd,
                    #[inline(always)]
                    || update_tile(self, clip, step, grad, param, m, v),
                )
            }),
            Some(param_bf16) => {
                tiles.zip(param_bf16.bf16().par_chunks_mut(TILE)).for_each(|((grad, param, m, v), param_bf16)| {
                    simd::with(
                        simd,
                        #[inline(always)]
                        || update_tile(self, clip, step, grad, param, m, v),
                    );
                    simd::with(
                        simd,
                        #[inline(always)]
                        || round_tile(param, param_bf16),
                    );
                })
            }
        }
        Ok(())
    }
}

#[inline(always)]
fn update_tile(
    op: &AdamW<'_>,
    clip: f32,
    step: [f32; 3],
    grad: &[f32],
    param: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
) {
    op.update(clip, step, grad, param, m, v);
}

#[inline(always)]
fn round_tile(param: &[f32], param_bf16: &mut [u16]) {
    FloatsMut::Bf16(param_bf16).store(0, param);
}
