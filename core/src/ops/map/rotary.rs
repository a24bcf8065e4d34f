//! Rotary position embedding (arXiv 2104.09864). NUMERICS.md, "Row-wise ops".

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, Values, distinct, number};
use crate::tensor::Tensor;

/// `out = rotate(x)` over whole heads.
///
/// # Shape
/// x, out: `[tokens, heads * dim]`; positions: u32 `[tokens]`; cos, sin: f32 `[positions, dim / 2]`.
///
/// # Numerics
/// [`Pairs`] in every head. A token whose position the tables do not have is copied.
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
    /// How the columns of a head form pairs.
    pub pairs: Pairs,
    /// Rotate back (the gradient).
    pub inverse: bool,
    /// The result, written.
    pub out: &'a Tensor,
}

op!(Rotary: read(x, positions, cos, sin), write(out), value(pairs, inverse));

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
    pub fn row(x: &[f32], pairs: Pairs, table: Angles<'_>, inverse: bool, out: &mut [f32]) {
        out.copy_from_slice(x);
        let dim = 2 * table.cos.len();
        if dim > 0 {
            out.chunks_exact_mut(dim).for_each(|head| pairs.rotate(head, table, inverse));
        }
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (x, mut out) = (Values::read(memory, self.x)?, Values::read(memory, self.out)?);
        let tables = Tables::read(memory, self.positions, self.cos, self.sin)?;
        let mut row = vec![0.0; self.x.cols()];
        for token in 0..self.x.rows() {
            Rotary::row(&x.row(token), self.pairs, tables.of_token(token), self.inverse, &mut row);
            out.set_row(token, &row);
        }
        out.write(memory)
    }
}

/// Which columns of the rotated part of a head, `dim` columns, form its `dim / 2` pairs. Pair i turns by the angle in
/// column i of the tables.
///
/// # Numerics
/// With the pair (a, b) and its cosine and sine (c, s): `(a * c - b * s, b * c + a * s)`, or back,
/// `(a * c + b * s, b * c - a * s)`: two products, one sum, no fma.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairs {
    /// Pair i is the columns (2i, 2i + 1) (DeepSeek-V3).
    Neighbours,
    /// Pair i is the columns (i, i + dim / 2) (Qwen3, Mixtral).
    Halves,
}

impl Pairs {
    /// Rotates the part `x` of a head, or `inverse`: rotates it back. Nothing at a position that the tables do not have.
    #[inline(always)]
    pub(super) fn rotate(self, x: &mut [f32], table: Angles<'_>, inverse: bool) {
        let angles = table.cos.iter().zip(table.sin);
        let turned = |a: f32, b: f32, (c, s): (&f32, &f32)| {
            if inverse { (a * c + b * s, b * c - a * s) } else { (a * c - b * s, b * c + a * s) }
        };
        match self {
            Pairs::Neighbours => {
                for ([a, b], angle) in x.as_chunks_mut().0.iter_mut().zip(angles) {
                    (*a, *b) = turned(*a, *b, angle);
                }
            }
            Pairs::Halves => {
                let (first, second) = x.split_at_mut(x.len() / 2);
                for ((a, b), angle) in first.iter_mut().zip(second).zip(angles) {
                    (*a, *b) = turned(*a, *b, angle);
                }
            }
        }
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
    columns: usize,
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
            columns: cos.cols(),
        })
    }

    pub(super) fn of_token(&self, token: usize) -> Angles<'_> {
        let at = self.positions.word(token) as usize * self.columns;
        let [cos, sin] = [&self.cos, &self.sin].map(|table| table.get(at..at + self.columns).unwrap_or(&[]));
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
