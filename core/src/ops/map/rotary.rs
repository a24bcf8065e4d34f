//! Rotary position embedding (arXiv 2104.09864). NUMERICS.md, "Row-wise ops".

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, Values, distinct, number};
use crate::tensor::Tensor;

/// `out = rotate(x)` over whole heads in halves: the pair i is the columns (i, i + dim / 2) of a head (Qwen3, Mixtral).
///
/// # Shape
/// x, out: `[tokens, heads * dim]`; positions: u32 `[tokens]`; cos, sin: f32 `[positions, dim / 2]`.
///
/// # Numerics
/// As [`super::Mla`]; `inverse` as [`super::MlaGrad`].
#[derive(Clone, Copy, Debug)]
pub struct Rotary<'a> {
    /// The heads.
    pub x: &'a Tensor,
    /// Position of each token.
    pub positions: &'a Tensor,
    /// Cosines.
    pub cos: &'a Tensor,
    /// Sines.
    pub sin: &'a Tensor,
    /// Rotate back (the gradient).
    pub inverse: bool,
    /// The result, written.
    pub out: &'a Tensor,
}

op!(Rotary: read(x, positions, cos, sin), write(out), value(inverse));

impl Rotary<'_> {
    pub(crate) const OP: &'static str = "rotary";

    pub(super) fn check(&self) -> Result<()> {
        let tokens = self.x.rows();
        let dim = 2 * self.cos.cols();
        let cols = self.x.cols();
        number(Self::OP, "x", dim > 0 && cols.is_multiple_of(dim), &format!("heads of {dim} columns"), cols)?;
        check_table(Self::OP, tokens, self.positions, self.cos, self.sin, dim)?;
        check_rows(Self::OP, tokens, self.x.dtype(), &[("x", self.x, cols)], &[("out", self.out, cols)])
    }

    /// The heads of one token, with its row of the tables.
    #[inline(always)]
    pub fn row(x: &[f32], table: Angles<'_>, inverse: bool, out: &mut [f32]) {
        let half = table.cos.len();
        if half == 0 {
            out.copy_from_slice(x);
            return;
        }
        for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
            let (a, b) = x.split_at(half);
            let (out_a, out_b) = out.split_at_mut(half);
            for ((((oa, ob), a), b), (c, s)) in
                out_a.iter_mut().zip(out_b).zip(a).zip(b).zip(table.cos.iter().zip(table.sin))
            {
                (*oa, *ob) = if inverse { (a * c + b * s, b * c - a * s) } else { (a * c - b * s, b * c + a * s) };
            }
        }
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (x, mut out) = (Values::read(memory, self.x)?, Values::read(memory, self.out)?);
        let tables = Tables::read(memory, self.positions, self.cos, self.sin)?;
        let mut row = vec![0.0; self.x.cols()];
        for token in 0..self.x.rows() {
            Rotary::row(&x.row(token), tables.of_token(token), self.inverse, &mut row);
            out.set_row(token, &row);
        }
        out.write(memory)
    }
}

/// One position's row of the rotation tables; empty for a position that they do not have, at which nothing is rotated.
#[derive(Clone, Copy, Debug)]
pub struct Angles<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
}

/// Rotation tables and the position of each token, for a specification.
pub(super) struct Tables<'a> {
    positions: Values<'a>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    pairs: usize,
}

impl<'a> Tables<'a> {
    pub(super) fn read(
        memory: &dyn Backend,
        positions: &'a Tensor,
        cos: &'a Tensor,
        sin: &'a Tensor,
    ) -> Result<Tables<'a>> {
        Ok(Tables {
            positions: Values::read(memory, positions)?,
            cos: Values::read(memory, cos)?.floats(),
            sin: Values::read(memory, sin)?.floats(),
            pairs: cos.cols(),
        })
    }

    pub(super) fn of_token(&self, token: usize) -> Angles<'_> {
        let at = self.positions.word(token) as usize * self.pairs;
        let [cos, sin] = [&self.cos, &self.sin].map(|table| table.get(at..at + self.pairs).unwrap_or(&[]));
        Angles { cos, sin }
    }
}

/// Checks a rotation table for `rope` rotated elements.
pub(super) fn check_table(
    op: &'static str,
    tokens: usize,
    positions: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    rope: usize,
) -> Result<()> {
    number(op, "rope", rope.is_multiple_of(2), "an even number of rotated elements", rope)?;
    Arg::new(op, "positions", positions).dtype(&[DType::U32])?.len(tokens, "one for each token")?;
    let rows = cos.rows();
    Arg::new(op, "cos", cos).dtype(&[DType::F32])?.shape(&[rows, rope / 2], "[positions, rope / 2]")?;
    Arg::new(op, "sin", sin).dtype(&[DType::F32])?.shape(&[rows, rope / 2], "[positions, rope / 2]")?;
    Ok(())
}

/// Checks operands of one type with one row for each token, then that the outputs have buffers of their own.
pub(super) fn check_rows(
    op: &'static str,
    tokens: usize,
    dtype: DType,
    inputs: &[(&'static str, &Tensor, usize)],
    outputs: &[(&'static str, &Tensor, usize)],
) -> Result<()> {
    for &(field, tensor, cols) in inputs.iter().chain(outputs) {
        Arg::new(op, field, tensor).dtype(FLOAT)?.dtype(&[dtype])?.shape(&[tokens, cols], "[tokens, columns]")?;
    }
    let mut others: Vec<&Tensor> = inputs.iter().map(|i| i.1).collect();
    for &(field, tensor, _) in outputs {
        distinct(op, field, tensor, &others)?;
        others.push(tensor);
    }
    Ok(())
}
