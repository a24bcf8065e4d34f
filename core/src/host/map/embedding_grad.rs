//! The gradient of an embedding, on stretches of the vocabulary.

use rayon::prelude::*;

use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory::{self, Floats};
use crate::host::simd;
use crate::ops::EmbeddingGrad;

impl Fast for EmbeddingGrad<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        const OP: &str = EmbeddingGrad::OP;
        let (dy, ids) = (memory::input(OP, self.dy)?, memory::input(OP, self.ids)?);
        let mut d_table = memory::output(OP, self.d_table)?;
        let (dy, ids) = (dy.floats(), ids.u32());
        let (groups, vocabulary, cols) = (self.d_table.shape()[0], self.d_table.shape()[1], self.d_table.shape()[2]);
        if ids.is_empty() || cols == 0 {
            return Ok(());
        }
        // Each thread owns a stretch of the vocabulary and looks through all tokens, so the order of the sums stays theirs.
        let tokens = ids.len() / groups;
        let stretch = vocabulary.div_ceil(2 * rayon::current_num_threads());
        let tables = d_table.f32().par_chunks_mut(vocabulary * cols).enumerate();
        tables.for_each(|(group, table)| {
            table.par_chunks_mut(stretch * cols).enumerate().for_each(|(s, table)| {
                simd::with(
                    simd,
                    #[inline(always)]
                    || embedding_stretch(dy, ids, group * tokens..(group + 1) * tokens, s * stretch, table),
                );
            });
        });
        Ok(())
    }
}

/// Adds the gradients of the ids from `first` on, as many as `table` has rows.
#[inline(always)]
fn embedding_stretch(dy: Floats<'_>, ids: &[u32], tokens: std::ops::Range<usize>, first: usize, table: &mut [f32]) {
    let cols = dy.len() / ids.len();
    let rows = first..first + table.len() / cols;
    for t in tokens {
        let id = ids[t] as usize;
        if rows.contains(&id) {
            dy.add_to(t * cols, &mut table[(id - first) * cols..(id - first + 1) * cols]);
        }
    }
}
