//! Attention on CPU threads, block of rows by block of rows. NUMERICS.md, "Attention".
//!
//! The forward pass does each block of each head on its own. The backward pass does one key head of one sequence on one
//! thread, since the gradients of its keys and values are chains over all rows of all its query heads.
//!
//! A block multiplies what a row does not see by a probability of zero, which adds nothing to a chain unless it is
//! infinite or NaN. Then the chain ends in a NaN, by which it is found, and the row (or key) is computed again alone,
//! from what it sees.

mod backward;
mod forward;

use std::ops::Range;

use rayon::prelude::*;

use super::Simd;
use super::memory::{Floats, FloatsMut, Input, min_rows, output};
use super::product::{Axis, Elements, Matrix};
use super::simd;
use crate::error::Result;
use crate::numerics::NumericModel;
use crate::ops::{Attention, AttentionShape, Checked, KEY_TILE};
use crate::tensor::Tensor;

const OP: &str = "attention";

/// Rows of a block. Half a key tile, so that little of the diagonal tiles is computed in vain; a multiple of every
/// model's step, so that the chains along the rows go on from block to block. No bit depends on it.
const BLOCK: usize = 64;

/// What the two passes need besides the tensors.
#[derive(Clone, Copy)]
struct Context<'a> {
    shape: AttentionShape,
    /// First visible key of each row.
    start: Option<&'a [u32]>,
    model: NumericModel,
    simd: Simd,
}

pub(super) fn run(op: &Checked<Attention<'_>>, model: NumericModel, simd: Simd) -> Result<()> {
    match &**op {
        Attention::Forward(op) => forward::run(op, model, simd),
        Attention::Backward(op) => backward::run(op, model, simd),
    }
}

impl Context<'_> {
    /// The first key that a row of a sequence sees.
    #[inline(always)]
    fn start(&self, batch: usize, row: usize) -> usize {
        self.start.map_or(0, |start| start[batch * self.shape.sequence + row] as usize)
    }

    /// The blocks of rows of a sequence.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let sequence = self.shape.sequence;
        (0..sequence).step_by(BLOCK).map(move |row| row..sequence.min(row + BLOCK))
    }

    /// The tiles of keys that some of these rows may see, cut at the last of them.
    fn tiles(&self, batch: usize, rows: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let first = rows.clone().map(|row| self.start(batch, row)).min().unwrap_or(0);
        let end = rows.end;
        (first / KEY_TILE * KEY_TILE..end).step_by(KEY_TILE).map(move |key| key..end.min(key + KEY_TILE))
    }
}

/// A tensor `[tokens, heads * dim]`.
#[derive(Clone, Copy)]
struct Heads<'a> {
    data: Elements<'a>,
    sequence: usize,
    heads: usize,
    dim: usize,
}

impl<'a> Heads<'a> {
    fn new(input: &'a Input<'_>, sequence: usize, heads: usize, dim: usize) -> Self {
        let data = match input.floats() {
            Floats::F32(x) => Elements::F32(x),
            Floats::Bf16(x) => Elements::Bf16(x),
        };
        Heads { data, sequence, heads, dim }
    }

    /// Rows of a head of a sequence, for chains along the head's elements.
    fn rows(&self, batch: usize, head: usize, rows: &Range<usize>) -> Matrix<'a> {
        let stride = self.heads * self.dim;
        Matrix {
            data: self.data,
            offset: (batch * self.sequence + rows.start) * stride + head * self.dim,
            rows: rows.len(),
            row: Axis::strided(stride),
            chain: Axis::strided(1),
        }
    }

    /// The transpose of [`rows`](Heads::rows), for chains along the rows.
    fn columns(&self, batch: usize, head: usize, rows: &Range<usize>) -> Matrix<'a> {
        let Matrix { row, chain, .. } = self.rows(batch, head, rows);
        Matrix { rows: self.dim, row: chain, chain: row, ..self.rows(batch, head, rows) }
    }

    /// A copy `[rows, dim]` of the rows that are seen; the others are zero.
    fn seen(&self, batch: usize, head: usize, rows: &Range<usize>, seen: impl Fn(usize) -> bool) -> Rounded {
        fn copy<T: Copy + Default>(x: &[T], from: impl Iterator<Item = Option<usize>>, dim: usize) -> Vec<T> {
            from.flat_map(|row| (0..dim).map(move |i| row.map_or(T::default(), |row| x[row + i]))).collect()
        }
        let Matrix { offset, row, .. } = self.rows(batch, head, rows);
        let from = rows.clone().map(|r| seen(r).then(|| offset + (r - rows.start) * row.stride));
        match self.data {
            Elements::F32(x) => Rounded::F32(copy(x, from, self.dim)),
            Elements::Bf16(x) => Rounded::Bf16(copy(x, from, self.dim)),
            Elements::E4m3(_) => unreachable!("operands of attention are floats"),
        }
    }
}

/// Probabilities or their gradients `[rows, keys]`, rounded to the type of the other operands.
enum Rounded {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

impl Rounded {
    /// Of the type of `other`.
    fn like(other: Elements<'_>) -> Self {
        match other {
            Elements::F32(_) => Rounded::F32(Vec::new()),
            Elements::Bf16(_) | Elements::E4m3(_) => Rounded::Bf16(Vec::new()),
        }
    }

    fn store(&mut self, simd: Simd, values: &[f32]) {
        let mut out = match self {
            Rounded::F32(out) => {
                out.resize(values.len(), 0.0);
                FloatsMut::F32(out)
            }
            Rounded::Bf16(out) => {
                out.resize(values.len(), 0);
                FloatsMut::Bf16(out)
            }
        };
        simd::with(
            simd,
            #[inline(always)]
            || out.store(0, values),
        );
    }

    fn elements(&self) -> Elements<'_> {
        match self {
            Rounded::F32(x) => Elements::F32(x),
            Rounded::Bf16(x) => Elements::Bf16(x),
        }
    }

    /// As a factor whose chains run along the keys.
    fn along_keys(&self, rows: usize, keys: usize) -> Matrix<'_> {
        let (row, chain) = (Axis::strided(keys), Axis::strided(1));
        Matrix { data: self.elements(), offset: 0, rows, row, chain }
    }

    /// As a factor whose chains run along the rows.
    fn along_rows(&self, keys: usize) -> Matrix<'_> {
        let (row, chain) = (Axis::strided(1), Axis::strided(keys));
        Matrix { data: self.elements(), offset: 0, rows: keys, row, chain }
    }
}

/// Room for `len` sums that begin at zero.
fn zeros(sums: &mut Vec<f32>, len: usize) -> &mut [f32] {
    sums.clear();
    sums.resize(len, 0.0);
    sums
}

/// Writes a tensor `[tokens, heads * dim]` from `of(sequence, row, head)`, which begins with the head's elements.
fn scatter<'a>(
    out: &Tensor,
    sequence: usize,
    dim: usize,
    of: impl Fn(usize, usize, usize) -> &'a [f32] + Sync,
) -> Result<()> {
    let (heads, tile) = (out.cols() / dim, min_rows(out.cols()));
    let write = |(t, mut piece): (usize, FloatsMut<'_>)| {
        for (i, from) in (0..piece.len()).step_by(dim).enumerate() {
            let (r, head) = (t * tile + i / heads, i % heads);
            piece.store(from, &of(r / sequence, r % sequence, head)[..dim]);
        }
    };
    output(OP, out)?.floats().pieces(tile * out.cols()).into_par_iter().enumerate().for_each(write);
    Ok(())
}
