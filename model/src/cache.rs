//! The key/value cache of generation.

use dropless_core::ops::CopyColumns;
use dropless_core::{Backend, Result, Tensor};

use crate::nn::Tokens;

/// What the layers keep of each sequence.
#[derive(Debug)]
pub struct Cache {
    /// Tokens of each sequence so far.
    pub(crate) lengths: Vec<usize>,
    /// Capacity of a sequence, in tokens.
    pub(crate) capacity: usize,
    /// By layer, then by sequence.
    pub(crate) layers: Vec<Vec<Kept>>,
}

/// What one layer keeps of one sequence, `[capacity, width]` each: the normalised latent and the rotary key of latent
/// attention, keys and values of grouped-query attention.
pub(crate) type Kept = [Tensor; 2];

/// New tokens of one sequence, which are consecutive rows of a pass.
#[derive(Debug)]
pub(crate) struct NewRows {
    /// First row of the pass.
    pub(crate) from: usize,
    /// Number of rows.
    pub(crate) count: usize,
    /// Tokens of the sequence before them.
    pub(crate) before: usize,
    /// The layout of the whole sequence, and the position of each of its tokens, u32 `[length]`.
    pub(crate) whole: Tokens,
    pub(crate) positions: Tensor,
}

/// Copies the rows of `x` over those of `out`, which have the same columns.
pub(crate) fn copy_rows(backend: &dyn Backend, x: &Tensor, out: &Tensor) -> Result<()> {
    CopyColumns { x, x_column: 0, out, out_column: 0, width: x.cols() }.run(backend)
}

impl NewRows {
    /// The rows in a value of all rows of the pass.
    pub(crate) fn of(&self, x: &Tensor) -> Result<Tensor> {
        x.slice(self.from, self.from + self.count)
    }

    /// Tokens of the sequence with the new ones.
    pub(crate) fn length(&self) -> usize {
        self.before + self.count
    }

    /// Puts these rows of `x` behind the ones kept before, and returns all of them, `[length, width]`.
    pub(crate) fn keep(&self, backend: &dyn Backend, x: &Tensor, kept: &Tensor) -> Result<Tensor> {
        let out = kept.slice(self.before, self.length())?;
        copy_rows(backend, &self.of(x)?, &out)?;
        kept.slice(0, self.length())
    }
}

impl Cache {
    /// Tokens of each sequence so far.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Forgets the tokens of a sequence.
    pub fn clear(&mut self, sequence: usize) {
        self.lengths[sequence] = 0;
    }
}
