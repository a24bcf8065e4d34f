//! Columns of one matrix into another, row by row.

use rayon::prelude::*;

use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory;
use crate::ops::CopyColumns;

impl Fast for CopyColumns<'_> {
    fn run(&self, _simd: Simd) -> Result<()> {
        let x = memory::input(CopyColumns::OP, self.x)?;
        let mut out = memory::output(CopyColumns::OP, self.out)?;
        let size = self.x.dtype().size();
        let (x_row, out_row, width) = (self.x.cols() * size, self.out.cols() * size, self.width * size);
        let (from, to) = (self.x_column * size, self.out_column * size);
        if width > 0 {
            let rows = x.bytes().par_chunks(x_row).zip(out.bytes().par_chunks_mut(out_row));
            rows.with_min_len(memory::min_rows(self.width))
                .for_each(|(x, out)| out[to..to + width].copy_from_slice(&x[from..from + width]));
        }
        Ok(())
    }
}
