//! Sums of tensors on tiles of elements.

use rayon::prelude::*;

use super::{Fast, Simd, TILE};
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut};
use crate::host::simd;
use crate::ops::Add;

impl Fast for Add<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        let (a, b) = (memory::input(Add::OP, self.a)?, memory::input(Add::OP, self.b)?);
        let c = memory::input_opt(Add::OP, self.c)?;
        let mut out = memory::output(Add::OP, self.out)?;
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
}

#[inline(always)]
fn add_tile(a: Floats<'_>, b: Floats<'_>, c: Option<Floats<'_>>, from: usize, out: FloatsMut<'_>) {
    let (mut out, mut values) = (out, [Vec::new(), Vec::new(), Vec::new(), Vec::new()]);
    let [a_values, b_values, c_values, sums] = &mut values;
    let len = out.len();
    let (a, b) = (a.span(from, len, a_values), b.span(from, len, b_values));
    let c = c.map(|c| c.span(from, len, c_values));
    add_row(a, b, c, &mut out.row(0, len, sums));
}

/// Any number of elements.
#[inline(always)]
fn add_row(a: &[f32], b: &[f32], c: Option<&[f32]>, out: &mut [f32]) {
    for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
        *o = a + b;
    }
    if let Some(c) = c {
        for (o, c) in out.iter_mut().zip(c) {
            *o += c;
        }
    }
}
