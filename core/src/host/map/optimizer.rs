//! The optimizer over flat runs of parameters.

use rayon::prelude::*;

use super::Simd;
use crate::error::Result;
use crate::host::memory::{self, FloatsMut};
use crate::host::simd;
use crate::ops::{AdamW, BiasUpdate, ClipScale};

/// Parameters of a tile.
const TILE: usize = 4096;

pub(super) fn clip_scale(op: &ClipScale<'_>) -> Result<()> {
    let squares = memory::input(ClipScale::OP, op.squares)?;
    let mut out = memory::output(ClipScale::OP, op.out)?;
    out.f32().copy_from_slice(&ClipScale::norm_and_factor(squares.f32(), op.max_norm));
    Ok(())
}

pub(super) fn bias_update(op: &BiasUpdate<'_>) -> Result<()> {
    let counts = memory::input(BiasUpdate::OP, op.counts)?;
    BiasUpdate::update(counts.u32(), op.rate, memory::output(BiasUpdate::OP, op.bias)?.f32());
    Ok(())
}

pub(super) fn adamw(op: &AdamW<'_>, simd: Simd) -> Result<()> {
    const OP: &str = AdamW::OP;
    let (grad, clip, step) = (memory::input(OP, op.grad)?, memory::input(OP, op.clip)?, memory::input(OP, op.step)?);
    let (mut param, mut m, mut v) =
        (memory::output(OP, op.param)?, memory::output(OP, op.m)?, memory::output(OP, op.v)?);
    let mut half = memory::output_opt(OP, op.half)?;
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
    match &mut half {
        None => tiles.for_each(|(grad, param, m, v)| {
            simd::with(
                simd,
                #[inline(always)]
                || update_tile(op, clip, step, grad, param, m, v),
            )
        }),
        Some(half) => tiles.zip(half.bf16().par_chunks_mut(TILE)).for_each(|((grad, param, m, v), half)| {
            simd::with(
                simd,
                #[inline(always)]
                || update_tile(op, clip, step, grad, param, m, v),
            );
            simd::with(
                simd,
                #[inline(always)]
                || round_tile(param, half),
            );
        }),
    }
    Ok(())
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
fn round_tile(param: &[f32], half: &mut [u16]) {
    FloatsMut::Bf16(half).store(0, param);
}
