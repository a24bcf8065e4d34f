//! The assembly of latent attention and its gradient, on tiles of tokens.

use rayon::prelude::*;

use super::rotary::{Locked, Tables};
use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut, Input};
use crate::host::simd;
use crate::ops::{Mla, MlaGrad, MlaShape};

/// Columns of the queries (and keys), of the joint keys and values, of the shared key, and of the values.
fn columns(MlaShape { heads, nope, rope, v, .. }: MlaShape) -> [usize; 4] {
    [heads * (nope + rope), heads * (nope + v), rope, heads * v]
}

impl Fast for Mla<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        const OP: &str = Mla::OP;
        let inputs = [memory::input(OP, self.q_in)?, memory::input(OP, self.kv)?, memory::input(OP, self.k_rope)?];
        let locked = Locked::new(OP, self.positions, self.cos, self.sin)?;
        let (mut q, mut k, mut v) =
            (memory::output(OP, self.q)?, memory::output(OP, self.k)?, memory::output(OP, self.v)?);
        let inputs = inputs.each_ref().map(Input::floats);
        let (shape, tables) = (self.shape, locked.tables(self.shape.rope / 2));
        let [q_cols, kv_cols, _, v_cols] = columns(shape);
        let tile = memory::min_rows(q_cols + kv_cols);
        (q.floats().pieces(tile * q_cols), k.floats().pieces(tile * q_cols), v.floats().pieces(tile * v_cols))
            .into_par_iter()
            .enumerate()
            .for_each(|(t, (q, k, v))| {
                simd::with(
                    simd,
                    #[inline(always)]
                    || mla_tile(shape, inputs, tables, t * tile, [q, k, v]),
                )
            });
        Ok(())
    }
}

/// Tokens from `first` on.
#[inline(always)]
fn mla_tile(shape: MlaShape, inputs: [Floats<'_>; 3], tables: Tables<'_>, first: usize, outputs: [FloatsMut<'_>; 3]) {
    let [mut q, mut k, mut v] = outputs;
    let [q_cols, kv_cols, rope, v_cols] = columns(shape);
    let mut scratch = [const { Vec::new() }; 6];
    let [q_in_row, kv_row, k_rope_row, q_row, k_row, v_row] = &mut scratch;
    for i in 0..q.len() / q_cols {
        let r = first + i;
        let q_in = inputs[0].row(r, q_cols, q_in_row);
        let kv = inputs[1].row(r, kv_cols, kv_row);
        let k_rope = inputs[2].row(r, rope, k_rope_row);
        let angles = tables.of_token(r);
        let (mut q, mut k) = (q.row(i, q_cols, q_row), k.row(i, q_cols, k_row));
        let mut v = v.row(i, v_cols, v_row);
        Mla::row(shape, [q_in, kv, k_rope], angles, [&mut q, &mut k, &mut v]);
    }
}

impl Fast for MlaGrad<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        const OP: &str = MlaGrad::OP;
        let inputs = [memory::input(OP, self.d_q)?, memory::input(OP, self.d_k)?, memory::input(OP, self.d_v)?];
        let locked = Locked::new(OP, self.positions, self.cos, self.sin)?;
        let (mut d_q_in, mut d_kv) = (memory::output(OP, self.d_q_in)?, memory::output(OP, self.d_kv)?);
        let mut d_k_rope = memory::output(OP, self.d_k_rope)?;
        let inputs = inputs.each_ref().map(Input::floats);
        let (shape, tables) = (self.shape, locked.tables(self.shape.rope / 2));
        let [q_cols, kv_cols, rope, _] = columns(shape);
        let tile = memory::min_rows(q_cols + kv_cols);
        (
            d_q_in.floats().pieces(tile * q_cols),
            d_kv.floats().pieces(tile * kv_cols),
            d_k_rope.floats().pieces(tile * rope),
        )
            .into_par_iter()
            .enumerate()
            .for_each(|(t, (d_q_in, d_kv, d_k_rope))| {
                simd::with(
                    simd,
                    #[inline(always)]
                    || mla_grad_tile(shape, inputs, tables, t * tile, [d_q_in, d_kv, d_k_rope]),
                );
            });
        Ok(())
    }
}

/// Tokens from `first` on.
#[inline(always)]
fn mla_grad_tile(
    shape: MlaShape,
    inputs: [Floats<'_>; 3],
    tables: Tables<'_>,
    first: usize,
    outputs: [FloatsMut<'_>; 3],
) {
    let [mut d_q_in, mut d_kv, mut d_k_rope] = outputs;
    let [q_cols, kv_cols, rope, v_cols] = columns(shape);
    let mut scratch = [const { Vec::new() }; 6];
    let [d_q_row, d_k_row, d_v_row, d_q_in_row, d_kv_row, d_k_rope_row] = &mut scratch;
    for i in 0..d_q_in.len() / q_cols {
        let r = first + i;
        let d_q = inputs[0].row(r, q_cols, d_q_row);
        let d_k = inputs[1].row(r, q_cols, d_k_row);
        let d_v = inputs[2].row(r, v_cols, d_v_row);
        let angles = tables.of_token(r);
        let mut d_q_in = d_q_in.row(i, q_cols, d_q_in_row);
        let mut d_kv = d_kv.row(i, kv_cols, d_kv_row);
        let mut d_k_rope = d_k_rope.row(i, rope, d_k_rope_row);
        MlaGrad::row(shape, [d_q, d_k, d_v], angles, [&mut d_q_in, &mut d_kv, &mut d_k_rope]);
    }
}
