//! RMSNorm and its gradient on tiles of rows.

use rayon::prelude::*;

use super::sum_rows::{BlockRows, token_sums};
use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut, Input};
use crate::host::simd;
use crate::ops::{RmsNorm, RmsNormGrad};

impl Fast for RmsNorm<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        const OP: &str = RmsNorm::OP;
        let (x, weight) = (memory::input(OP, self.x)?, memory::input(OP, self.weight)?);
        let (mut out, mut rstd) = (memory::output(OP, self.out)?, memory::output(OP, self.rstd)?);
        let (x, weight) = (x.floats(), weight.f32());
        let tile = memory::min_rows(weight.len());
        (out.floats().pieces(tile * weight.len()), rstd.f32().par_chunks_mut(tile))
            .into_par_iter()
            .enumerate()
            .for_each(|(t, (out, rstd))| {
                simd::with(
                    simd,
                    #[inline(always)]
                    || norm_tile(x, weight, self.eps, t * tile, out, rstd),
                )
            });
        Ok(())
    }
}

/// Rows from `first` on, one for each element of `rstd`.
#[inline(always)]
fn norm_tile(x: Floats<'_>, weight: &[f32], eps: f32, first: usize, out: FloatsMut<'_>, rstd: &mut [f32]) {
    let (mut out, mut x_row, mut out_row) = (out, Vec::new(), Vec::new());
    for (i, rstd) in rstd.iter_mut().enumerate() {
        let x = x.row(first + i, weight.len(), &mut x_row);
        *rstd = RmsNorm::row(x, weight, eps, &mut out.row(i, weight.len(), &mut out_row));
    }
}

/// What both gradients read.
#[derive(Clone, Copy)]
struct Rows<'a> {
    dy: Floats<'a>,
    x: Floats<'a>,
    weight: &'a [f32],
    rstd: &'a [f32],
    residual: Option<Floats<'a>>,
}

impl Fast for RmsNormGrad<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        const OP: &str = RmsNormGrad::OP;
        let (dy, x) = (memory::input(OP, self.dy)?, memory::input(OP, self.x)?);
        let (weight, rstd) = (memory::input(OP, self.weight)?, memory::input(OP, self.rstd)?);
        let residual = memory::input_opt(OP, self.residual)?;
        let (mut dx, mut d_weight) = (memory::output(OP, self.dx)?, memory::output(OP, self.d_weight)?);
        let residual = residual.as_ref().map(Input::floats);
        let rows = Rows { dy: dy.floats(), x: x.floats(), weight: weight.f32(), rstd: rstd.f32(), residual };

        let cols = rows.weight.len();
        let tile = memory::min_rows(cols);
        dx.floats().pieces(tile * cols).into_par_iter().enumerate().for_each(|(t, dx)| {
            simd::with(
                simd,
                #[inline(always)]
                || grad_tile(rows, t * tile, dx),
            )
        });

        let sums = token_sums(self.x.rows(), cols, self.d_weight.rows(), |block, sums| {
            simd::with(
                simd,
                #[inline(always)]
                || weight_block(rows, block, sums),
            )
        });
        for (d_weight, sum) in d_weight.f32().iter_mut().zip(sums) {
            *d_weight += sum;
        }
        Ok(())
    }
}

/// The gradient of the rows from `first` on.
#[inline(always)]
fn grad_tile(rows: Rows<'_>, first: usize, dx: FloatsMut<'_>) {
    let (mut dx, mut values) = (dx, [Vec::new(), Vec::new(), Vec::new(), Vec::new()]);
    let [dy_row, x_row, residual_row, dx_row] = &mut values;
    let cols = rows.weight.len();
    for i in 0..dx.len() / cols {
        let r = first + i;
        let (dy, x) = (rows.dy.row(r, cols, dy_row), rows.x.row(r, cols, x_row));
        let residual = rows.residual.map(|residual| residual.row(r, cols, residual_row));
        RmsNormGrad::row(dy, x, rows.weight, rows.rstd[r], residual, &mut dx.row(i, cols, dx_row));
    }
}

/// The sums over a block of rows for the gradient of the norm weight.
#[inline(always)]
fn weight_block(rows: Rows<'_>, block: BlockRows, sums: &mut [f32]) {
    let (mut dy_row, mut x_row, mut terms) = (Vec::new(), Vec::new(), vec![0.0; sums.len()]);
    for r in block.clone() {
        let (dy, x) = (rows.dy.row(r, sums.len(), &mut dy_row), rows.x.row(r, sums.len(), &mut x_row));
        if r == block.start {
            RmsNormGrad::weight_row(dy, x, rows.rstd[r], sums);
        } else {
            RmsNormGrad::weight_row(dy, x, rows.rstd[r], &mut terms);
            Floats::F32(&terms).add_to(0, sums);
        }
    }
}
