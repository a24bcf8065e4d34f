//! Conversion between float types on tiles of elements.

use rayon::prelude::*;

use super::{Fast, Simd, TILE};
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut};
use crate::host::simd;
use crate::ops::Cast;

impl Fast for Cast<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        let x = memory::input(Cast::OP, self.x)?;
        let mut out = memory::output(Cast::OP, self.out)?;
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
}

#[inline(always)]
fn cast_tile(x: Floats<'_>, from: usize, out: FloatsMut<'_>) {
    let (mut out, mut values) = (out, Vec::new());
    let len = out.len();
    out.store(0, x.span(from, len, &mut values));
}
