//! Rotary position embedding (arXiv 2104.09864), and the assembly of queries, keys and values of multi-head latent
//! attention (arXiv 2405.04434, section 2.1). NUMERICS.md, "Row-wise ops".

use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, distinct, number};
use crate::tensor::Tensor;

/// Extents of multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaShape {
    /// Heads.
    pub heads: usize,
    /// Elements of a query or key without position.
    pub nope: usize,
    /// Elements with position (even, above 0).
    pub rope: usize,
    /// Elements of a value.
    pub v: usize,
}

impl MlaShape {
    fn check(self, op: &'static str) -> Result<Self> {
        let MlaShape { heads, rope, v, .. } = self;
        number(op, "shape", heads > 0 && rope > 0 && v > 0, "heads, rope and v above 0", format_args!("{self:?}"))?;
        Ok(self)
    }
}

/// Rotates the rotary part of the queries and of the shared key, and lays out queries, keys and values for attention.
///
/// # Shape
/// q_in, q, k: `[tokens, heads * (nope + rope)]`; kv: `[tokens, heads * (nope + v)]`; k_rope: `[tokens, rope]`;
/// v: `[tokens, heads * v]`; positions: u32 `[tokens]`; cos, sin: f32 `[positions, rope / 2]`.
///
/// # Numerics
/// Interleaved pairs: with x = (a, b) at columns (2i, 2i + 1) of the rotary part and c, s from row `position`, column i:
/// `(a * c - b * s, b * c + a * s)`: two products, one sum, no fma. The rest is copied.
#[derive(Clone, Copy, Debug)]
pub struct Mla<'a> {
    /// Queries as projected.
    pub q_in: &'a Tensor,
    /// Keys (without position) and values as projected.
    pub kv: &'a Tensor,
    /// The rotary key that all heads share, as projected.
    pub k_rope: &'a Tensor,
    /// Position of each token in its document.
    pub positions: &'a Tensor,
    /// Cosines.
    pub cos: &'a Tensor,
    /// Sines.
    pub sin: &'a Tensor,
    /// Queries, written.
    pub q: &'a Tensor,
    /// Keys, written.
    pub k: &'a Tensor,
    /// Values, written.
    pub v: &'a Tensor,
    /// Extents.
    pub shape: MlaShape,
}

op!(Mla: read(q_in, kv, k_rope, positions, cos, sin), write(q, k, v), value(shape));

/// The gradients of [`Mla`].
///
/// # Shape
/// As [`Mla`], each gradient as its value.
///
/// # Numerics
/// The inverse rotation `(a * c + b * s, b * c - a * s)`. The heads' gradients of the shared key are added in the order
/// of the heads in f32, then rotated and rounded once.
#[derive(Clone, Copy, Debug)]
pub struct MlaGrad<'a> {
    /// Gradient of the queries.
    pub d_q: &'a Tensor,
    /// Gradient of the keys.
    pub d_k: &'a Tensor,
    /// Gradient of the values.
    pub d_v: &'a Tensor,
    /// Position of each token.
    pub positions: &'a Tensor,
    /// Cosines.
    pub cos: &'a Tensor,
    /// Sines.
    pub sin: &'a Tensor,
    /// Gradient of `q_in`, written.
    pub d_q_in: &'a Tensor,
    /// Gradient of `kv`, written.
    pub d_kv: &'a Tensor,
    /// Gradient of `k_rope`, written.
    pub d_k_rope: &'a Tensor,
    /// Extents.
    pub shape: MlaShape,
}

op!(MlaGrad: read(d_q, d_k, d_v, positions, cos, sin), write(d_q_in, d_kv, d_k_rope), value(shape));

/// `out = rotate(x)` over whole heads in halves: the pair i is the columns (i, i + dim / 2) of a head (Qwen3, Mixtral).
///
/// # Shape
/// x, out: `[tokens, heads * dim]`; positions: u32 `[tokens]`; cos, sin: f32 `[positions, dim / 2]`.
///
/// # Numerics
/// As [`Mla`]; `inverse` as [`MlaGrad`].
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

/// One position's row of the rotation tables.
#[derive(Clone, Copy, Debug)]
pub struct Angles<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
}

/// Rotates neighbouring pairs.
#[inline(always)]
fn rotate_pairs(x: &mut [f32], table: Angles<'_>) {
    for (pair, (c, s)) in x.as_chunks_mut().0.iter_mut().zip(table.cos.iter().zip(table.sin)) {
        let [a, b] = *pair;
        *pair = [a * c - b * s, b * c + a * s];
    }
}

/// Rotates neighbouring pairs back.
#[inline(always)]
fn unrotate_pairs(x: &mut [f32], table: Angles<'_>) {
    for (pair, (c, s)) in x.as_chunks_mut().0.iter_mut().zip(table.cos.iter().zip(table.sin)) {
        let [a, b] = *pair;
        *pair = [a * c + b * s, b * c - a * s];
    }
}

/// Checks a rotation table for `rope` rotated elements.
fn check_table(
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
fn check_rows(
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

impl Mla<'_> {
    pub(crate) const OP: &'static str = "mla";

    pub(super) fn check(&self) -> Result<()> {
        let MlaShape { heads, nope, rope, v } = self.shape.check(Self::OP)?;
        let tokens = self.q_in.rows();
        check_table(Self::OP, tokens, self.positions, self.cos, self.sin, rope)?;
        check_rows(
            Self::OP,
            tokens,
            self.q_in.dtype(),
            &[
                ("q_in", self.q_in, heads * (nope + rope)),
                ("kv", self.kv, heads * (nope + v)),
                ("k_rope", self.k_rope, rope),
            ],
            &[("q", self.q, heads * (nope + rope)), ("k", self.k, heads * (nope + rope)), ("v", self.v, heads * v)],
        )
    }

    /// One token: its `q_in`, `kv` and `k_rope`, and its row of the tables.
    #[inline(always)]
    pub fn row(shape: MlaShape, [q_in, kv, k_rope]: [&[f32]; 3], table: Angles<'_>, [q, k, v]: [&mut [f32]; 3]) {
        let MlaShape { heads, nope, rope, v: v_dim } = shape;
        for head in 0..heads {
            let (at, kv_at) = (head * (nope + rope), head * (nope + v_dim));
            let rotary = at + nope..at + nope + rope;
            q[at..rotary.end].copy_from_slice(&q_in[at..rotary.end]);
            rotate_pairs(&mut q[rotary.clone()], table);
            k[at..at + nope].copy_from_slice(&kv[kv_at..kv_at + nope]);
            k[rotary.clone()].copy_from_slice(k_rope);
            rotate_pairs(&mut k[rotary], table);
            v[head * v_dim..(head + 1) * v_dim].copy_from_slice(&kv[kv_at + nope..kv_at + nope + v_dim]);
        }
    }
}

impl MlaGrad<'_> {
    pub(crate) const OP: &'static str = "mla_grad";

    pub(super) fn check(&self) -> Result<()> {
        let MlaShape { heads, nope, rope, v } = self.shape.check(Self::OP)?;
        let tokens = self.d_q.rows();
        check_table(Self::OP, tokens, self.positions, self.cos, self.sin, rope)?;
        check_rows(
            Self::OP,
            tokens,
            self.d_q.dtype(),
            &[
                ("d_q", self.d_q, heads * (nope + rope)),
                ("d_k", self.d_k, heads * (nope + rope)),
                ("d_v", self.d_v, heads * v),
            ],
            &[
                ("d_q_in", self.d_q_in, heads * (nope + rope)),
                ("d_kv", self.d_kv, heads * (nope + v)),
                ("d_k_rope", self.d_k_rope, rope),
            ],
        )
    }

    /// One token: its `d_q`, `d_k` and `d_v`, and its row of the tables.
    #[inline(always)]
    pub fn row(
        shape: MlaShape,
        [d_q, d_k, d_v]: [&[f32]; 3],
        table: Angles<'_>,
        [d_q_in, d_kv, d_k_rope]: [&mut [f32]; 3],
    ) {
        let MlaShape { heads, nope, rope, v: v_dim } = shape;
        for head in 0..heads {
            let (at, kv_at) = (head * (nope + rope), head * (nope + v_dim));
            let rotary = at + nope..at + nope + rope;
            d_q_in[at..rotary.end].copy_from_slice(&d_q[at..rotary.end]);
            unrotate_pairs(&mut d_q_in[rotary.clone()], table);
            d_kv[kv_at..kv_at + nope].copy_from_slice(&d_k[at..at + nope]);
            d_kv[kv_at + nope..kv_at + nope + v_dim].copy_from_slice(&d_v[head * v_dim..(head + 1) * v_dim]);
            if head == 0 {
                d_k_rope.copy_from_slice(&d_k[rotary]);
            } else {
                for (sum, d) in d_k_rope.iter_mut().zip(&d_k[rotary]) {
                    *sum += d;
                }
            }
        }
        unrotate_pairs(d_k_rope, table);
    }
}

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
}
