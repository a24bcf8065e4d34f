//! Rotary embedding on tiles of tokens.

use rayon::prelude::*;

use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut, Input};
use crate::host::simd;
use crate::ops::{Angles, Pairs, Rotary};
use crate::tensor::Tensor;

/// The rotation tables with the position of each token, locked.
pub(super) struct Locked<'a> {
    positions: Input<'a>,
    cos: Input<'a>,
    sin: Input<'a>,
}

/// The rotation tables with the position of each token.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    positions: &'a [u32],
    cos: &'a [f32],
    sin: &'a [f32],
    columns: usize,
}

impl<'a> Locked<'a> {
    pub(super) fn new(op: &'static str, positions: &'a Tensor, cos: &'a Tensor, sin: &'a Tensor) -> Result<Self> {
        let [positions, cos, sin] = [positions, cos, sin].map(|tensor| memory::input(op, tensor));
        Ok(Locked { positions: positions?, cos: cos?, sin: sin? })
    }

    pub(super) fn tables(&self, columns: usize) -> Tables<'_> {
        Tables { positions: self.positions.u32(), cos: self.cos.f32(), sin: self.sin.f32(), columns }
    }
}

impl<'a> Tables<'a> {
    #[inline(always)]
    pub(super) fn of_token(self, token: usize) -> Angles<'a> {
        let at = self.positions[token] as usize * self.columns;
        let row = |table: &'a [f32]| table.get(at..at + self.columns).unwrap_or_default();
        Angles { cos: row(self.cos), sin: row(self.sin) }
    }
}

impl Fast for Rotary<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        let x = memory::input(Rotary::OP, self.x)?;
        let locked = Locked::new(Rotary::OP, self.positions, self.cos, self.sin)?;
        let mut out = memory::output(Rotary::OP, self.out)?;
        let (x, cols, tables) = (x.floats(), self.x.cols(), locked.tables(self.cos.cols()));
        let (pairs, inverse, tile) = (self.pairs, self.inverse, memory::min_rows(cols));
        out.floats().pieces(tile * cols).into_par_iter().enumerate().for_each(|(t, out)| {
            simd::with(
                simd,
                #[inline(always)]
                || rotary_tile(x, cols, pairs, tables, inverse, t * tile, out),
            )
        });
        Ok(())
    }
}

/// Tokens from `first` on.
#[inline(always)]
fn rotary_tile(
    x: Floats<'_>,
    cols: usize,
    pairs: Pairs,
    tables: Tables<'_>,
    inverse: bool,
    first: usize,
    mut out: FloatsMut<'_>,
) {
    let (mut x_row, mut out_row) = (Vec::new(), Vec::new());
    for i in 0..out.len() / cols {
        let (x, angles) = (x.row(first + i, cols, &mut x_row), tables.of_token(first + i));
        Rotary::row(x, pairs, angles, inverse, &mut out.row(i, cols, &mut out_row));
    }
}
