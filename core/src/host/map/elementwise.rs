//! Copies, conversions and sums of whole tensors.

use rayon::prelude::*;

use super::Simd;
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut};
use crate::host::simd;
use crate::numerics::bf16;
use crate::ops::{Add, Cast, CopyColumns, Fill};
use crate::tensor::DType;

/// Elements of a tile: a few kilobytes, which stay in a core's first cache.
const TILE: usize = 4096;

pub(super) fn cast(op: &Cast<'_>, simd: Simd) -> Result<()> {
    let x = memory::input(Cast::OP, op.x)?;
    let mut out = memory::output(Cast::OP, op.out)?;
    let x = x.floats();
    out.floats().pieces(TILE).into_par_iter().enumerate().for_each(|(t, out)| {
        simd::with(
            simd,
            #[inline(always)]
            || cast_tile(x, t * TILE, out),
        )
    });
    Ok(())
}

#[inline(always)]
fn cast_tile(x: Floats<'_>, from: usize, out: FloatsMut<'_>) {
    let (mut out, mut values) = (out, Vec::new());
    let len = out.len();
    out.store(0, x.span(from, len, &mut values));
}

pub(super) fn add(op: &Add<'_>, simd: Simd) -> Result<()> {
    let (a, b) = (memory::input(Add::OP, op.a)?, memory::input(Add::OP, op.b)?);
    let c = memory::input_opt(Add::OP, op.c)?;
    let mut out = memory::output(Add::OP, op.out)?;
    let (a, b, c) = (a.floats(), b.floats(), c.as_ref().map(memory::Input::floats));
    out.floats().pieces(TILE).into_par_iter().enumerate().for_each(|(t, out)| {
        simd::with(
            simd,
            #[inline(always)]
            || add_tile(a, b, c, t * TILE, out),
        )
    });
    Ok(())
}

#[inline(always)]
fn add_tile(a: Floats<'_>, b: Floats<'_>, c: Option<Floats<'_>>, from: usize, out: FloatsMut<'_>) {
    let (mut out, mut values) = (out, [Vec::new(), Vec::new(), Vec::new(), Vec::new()]);
    let [a_values, b_values, c_values, sums] = &mut values;
    let len = out.len();
    let (a, b) = (a.span(from, len, a_values), b.span(from, len, b_values));
    let c = c.map(|c| c.span(from, len, c_values));
    Add::row(a, b, c, &mut out.row(0, len, sums));
}

pub(super) fn fill(op: &Fill<'_>) -> Result<()> {
    let mut out = memory::output(Fill::OP, op.out)?;
    match op.out.dtype() {
        DType::F32 => out.f32().par_chunks_mut(TILE).for_each(|out| out.fill(op.value)),
        DType::Bf16 => out.bf16().par_chunks_mut(TILE).for_each(|out| out.fill(bf16::from_f32(op.value))),
        _ => out.bytes().par_chunks_mut(TILE).for_each(|out| out.fill(0)),
    }
    Ok(())
}

pub(super) fn copy_columns(op: &CopyColumns<'_>) -> Result<()> {
    let x = memory::input(CopyColumns::OP, op.x)?;
    let mut out = memory::output(CopyColumns::OP, op.out)?;
    let size = op.x.dtype().size();
    let (x_row, out_row, width) = (op.x.cols() * size, op.out.cols() * size, op.width * size);
    let (from, to) = (op.x_column * size, op.out_column * size);
    if width > 0 {
        let rows = x.bytes().par_chunks(x_row).zip(out.bytes().par_chunks_mut(out_row));
        rows.with_min_len(memory::min_rows(op.width))
            .for_each(|(x, out)| out[to..to + width].copy_from_slice(&x[from..from + width]));
    }
    Ok(())
}
