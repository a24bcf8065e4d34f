//! Rows taken by index, on tiles of rows.

use rayon::prelude::*;

use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut};
use crate::host::simd;
use crate::ops::GatherRows;

impl Fast for GatherRows<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        const OP: &str = GatherRows::OP;
        let (x, index) = (memory::input(OP, self.x)?, memory::input(OP, self.index)?);
        let mut out = memory::output(OP, self.out)?;
        let (index, cols) = (index.u32(), self.x.cols());
        let sources = self.x.rows();
        let tile = memory::min_rows(cols);
        if self.x.dtype() == self.out.dtype() {
            let (x, row) = (x.bytes(), cols * self.x.dtype().size());
            let rows = out.bytes().par_chunks_mut(row.max(1)).zip(index).with_min_len(tile);
            rows.filter(|(_, i)| (**i as usize) < sources)
                .for_each(|(out, &i)| out.copy_from_slice(&x[i as usize * row..(i as usize + 1) * row]));
        } else {
            let x = x.floats();
            (out.floats().pieces(tile * cols), index.par_chunks(tile)).into_par_iter().for_each(|(out, index)| {
                simd::with(
                    simd,
                    #[inline(always)]
                    || convert_tile(x, sources, cols, index, out),
                )
            });
        }
        Ok(())
    }
}

/// Gathers rows of another float type.
#[inline(always)]
fn convert_tile(x: Floats<'_>, sources: usize, cols: usize, index: &[u32], out: FloatsMut<'_>) {
    let (mut out, mut x_row) = (out, Vec::new());
    for (i, &from) in index.iter().enumerate() {
        let from = from as usize;
        if from < sources {
            out.store(i * cols, x.row(from, cols, &mut x_row));
        }
    }
}
