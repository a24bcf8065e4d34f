//! Sums of squares on tiles of rows.

use rayon::prelude::*;

use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory::{self, Floats};
use crate::host::simd;
use crate::ops::SumSquares;

impl Fast for SumSquares<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        let x = memory::input(SumSquares::OP, self.x)?;
        let mut out = memory::output(SumSquares::OP, self.out)?;
        let (x, cols) = (x.floats(), self.x.cols());
        let tile = memory::min_rows(cols);
        out.f32().par_chunks_mut(tile).enumerate().for_each(|(t, out)| {
            simd::with(
                simd,
                #[inline(always)]
                || square_tile(x, cols, t * tile, out),
            )
        });
        Ok(())
    }
}

/// Rows from `first` on, one for each element of `out`.
#[inline(always)]
fn square_tile(x: Floats<'_>, cols: usize, first: usize, out: &mut [f32]) {
    let mut x_row = Vec::new();
    for (i, out) in out.iter_mut().enumerate() {
        *out = SumSquares::row(x.row(first + i, cols, &mut x_row));
    }
}
