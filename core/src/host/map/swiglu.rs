//! SwiGLU and its gradient on tiles of rows.

use rayon::prelude::*;

use super::indices;
use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut, Input};
use crate::host::simd;
use crate::ops::{Swiglu, SwigluGrad};

impl Fast for Swiglu<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        const OP: &str = Swiglu::OP;
        let (gate_up, weight) = (memory::input(OP, self.gate_up)?, memory::input_opt(OP, self.weight)?);
        let limit = indices::limit(OP, self.limit, self.gate_up.rows())?;
        let mut out = memory::output(OP, self.out)?;
        let (gate_up, weight) = (gate_up.floats(), weight.as_ref().map(Input::f32));
        let width = self.gate_up.cols() / 2;
        let tile = memory::min_rows(width);
        let out = out.floats().first(limit * width);
        out.pieces(tile * width).into_par_iter().enumerate().for_each(|(t, out)| {
            simd::with(
                simd,
                #[inline(always)]
                || forward_tile(gate_up, weight, width, t * tile, out),
            )
        });
        Ok(())
    }
}

/// Rows from `first` on.
#[inline(always)]
fn forward_tile(gate_up: Floats<'_>, weight: Option<&[f32]>, width: usize, first: usize, out: FloatsMut<'_>) {
    let (mut out, mut gate_up_row, mut out_row) = (out, Vec::new(), Vec::new());
    for i in 0..out.len() / width {
        let r = first + i;
        let gate_up = gate_up.row(r, 2 * width, &mut gate_up_row);
        let weight = weight.map_or(1.0, |weight| weight[r]);
        Swiglu::row(gate_up, weight, &mut out.row(i, width, &mut out_row));
    }
}

impl Fast for SwigluGrad<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        const OP: &str = SwigluGrad::OP;
        let (gate_up, weight) = (memory::input(OP, self.gate_up)?, memory::input_opt(OP, self.weight)?);
        let d_out = memory::input(OP, self.d_out)?;
        let limit = indices::limit(OP, self.limit, self.gate_up.rows())?;
        let (mut d_gate_up, mut d_weight) =
            (memory::output(OP, self.d_gate_up)?, memory::output_opt(OP, self.d_weight)?);
        let rows = Rows { gate_up: gate_up.floats(), weight: weight.as_ref().map(Input::f32), d_out: d_out.floats() };
        let width = self.gate_up.cols() / 2;
        let tile = memory::min_rows(width);
        let d_gate_up = d_gate_up.floats().first(limit * 2 * width).pieces(tile * 2 * width);
        let tiles = d_gate_up.into_par_iter().enumerate();
        match &mut d_weight {
            Some(d_weight) => tiles.zip(d_weight.f32().par_chunks_mut(tile)).for_each(|((t, d), d_weight)| {
                simd::with(
                    simd,
                    #[inline(always)]
                    || grad_tile(rows, width, t * tile, d, Some(d_weight)),
                )
            }),
            None => tiles.for_each(|(t, d)| {
                simd::with(
                    simd,
                    #[inline(always)]
                    || grad_tile(rows, width, t * tile, d, None),
                )
            }),
        }
        Ok(())
    }
}

/// What the gradient reads.
#[derive(Clone, Copy)]
struct Rows<'a> {
    gate_up: Floats<'a>,
    weight: Option<&'a [f32]>,
    d_out: Floats<'a>,
}

/// Rows from `first` on.
#[inline(always)]
fn grad_tile(rows: Rows<'_>, width: usize, first: usize, d_gate_up: FloatsMut<'_>, d_weight: Option<&mut [f32]>) {
    let (mut d_gate_up, mut d_weight) = (d_gate_up, d_weight);
    let (mut gate_up_row, mut d_out_row, mut d_row) = (Vec::new(), Vec::new(), Vec::new());
    for i in 0..d_gate_up.len() / (2 * width) {
        let r = first + i;
        let gate_up = rows.gate_up.row(r, 2 * width, &mut gate_up_row);
        let d_out = rows.d_out.row(r, width, &mut d_out_row);
        let weight = rows.weight.map_or(1.0, |weight| weight[r]);
        let sum = SwigluGrad::row(gate_up, weight, d_out, &mut d_gate_up.row(i, 2 * width, &mut d_row));
        if let Some(d_weight) = &mut d_weight {
            d_weight[i] = sum;
        }
    }
}
