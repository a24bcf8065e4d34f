//! The assembly of queries, keys and values of multi-head latent attention (arXiv 2405.04434, section 2.1).
//! NUMERICS.md, "Row-wise ops".

use super::rotary::{Angles, Pairs, Tables, check_rows, check_table};
use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Values, number};
use crate::tensor::Tensor;

/// Extents of multi-head latent attention, and how its rotary part is rotated.
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
    /// How the elements with position form pairs.
    pub pairs: Pairs,
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
/// [`Pairs`] in the rotary part of every head. The rest is copied, and so is everything of a token whose position the
/// tables do not have.
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
    /// Extents and pairs.
    pub shape: MlaShape,
}

op!(Mla: read(q_in, kv, k_rope, positions, cos, sin), write(q, k, v), value(shape));

impl Mla<'_> {
    pub(crate) const OP: &'static str = "mla";

    pub(super) fn check(&self) -> Result<()> {
        let MlaShape { heads, nope, rope, v, .. } = self.shape.check(Self::OP)?;
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
        let MlaShape { heads, nope, rope, v: v_dim, pairs } = shape;
        for head in 0..heads {
            let (at, kv_at) = (head * (nope + rope), head * (nope + v_dim));
            let rotary = at + nope..at + nope + rope;
            q[at..rotary.end].copy_from_slice(&q_in[at..rotary.end]);
            pairs.rotate(&mut q[rotary.clone()], table, false);
            k[at..at + nope].copy_from_slice(&kv[kv_at..kv_at + nope]);
            k[rotary.clone()].copy_from_slice(k_rope);
            pairs.rotate(&mut k[rotary], table, false);
            v[head * v_dim..(head + 1) * v_dim].copy_from_slice(&kv[kv_at + nope..kv_at + nope + v_dim]);
        }
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (q_in, kv, k_rope) =
            (Values::read(memory, self.q_in)?, Values::read(memory, self.kv)?, Values::read(memory, self.k_rope)?);
        let tables = Tables::read(memory, self.positions, self.cos, self.sin)?;
        let (mut q, mut k, mut v) =
            (Values::read(memory, self.q)?, Values::read(memory, self.k)?, Values::read(memory, self.v)?);
        let (mut q_row, mut k_row, mut v_row) = (q.row_of_zeros(), k.row_of_zeros(), v.row_of_zeros());
        for token in 0..self.q_in.rows() {
            let inputs = [&q_in.row(token)[..], &kv.row(token), &k_rope.row(token)];
            Mla::row(self.shape, inputs, tables.of_token(token), [&mut q_row, &mut k_row, &mut v_row]);
            q.set_row(token, &q_row);
            k.set_row(token, &k_row);
            v.set_row(token, &v_row);
        }
        [q, k, v].iter().try_for_each(|values| values.write(memory))
    }
}

/// The gradients of [`Mla`].
///
/// # Shape
/// As [`Mla`], each gradient as its value.
///
/// # Numerics
/// [`Pairs`], rotated back. The heads' gradients of the shared key are added in the order of the heads in f32, then
/// rotated and rounded once.
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
    /// Extents and pairs.
    pub shape: MlaShape,
}

op!(MlaGrad: read(d_q, d_k, d_v, positions, cos, sin), write(d_q_in, d_kv, d_k_rope), value(shape));

impl MlaGrad<'_> {
    pub(crate) const OP: &'static str = "mla_grad";

    pub(super) fn check(&self) -> Result<()> {
        let MlaShape { heads, nope, rope, v, .. } = self.shape.check(Self::OP)?;
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
        let MlaShape { heads, nope, rope, v: v_dim, pairs } = shape;
        for head in 0..heads {
            let (at, kv_at) = (head * (nope + rope), head * (nope + v_dim));
            let rotary = at + nope..at + nope + rope;
            d_q_in[at..rotary.end].copy_from_slice(&d_q[at..rotary.end]);
            pairs.rotate(&mut d_q_in[rotary.clone()], table, true);
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
        pairs.rotate(d_k_rope, table, true);
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (d_q, d_k, d_v) =
            (Values::read(memory, self.d_q)?, Values::read(memory, self.d_k)?, Values::read(memory, self.d_v)?);
        let tables = Tables::read(memory, self.positions, self.cos, self.sin)?;
        let (mut d_q_in, mut d_kv, mut d_k_rope) = (
            Values::read(memory, self.d_q_in)?,
            Values::read(memory, self.d_kv)?,
            Values::read(memory, self.d_k_rope)?,
        );
        let (mut q_row, mut kv_row, mut rope_row) =
            (d_q_in.row_of_zeros(), d_kv.row_of_zeros(), d_k_rope.row_of_zeros());
        for token in 0..self.d_q.rows() {
            let inputs = [&d_q.row(token)[..], &d_k.row(token), &d_v.row(token)];
            MlaGrad::row(self.shape, inputs, tables.of_token(token), [&mut q_row, &mut kv_row, &mut rope_row]);
            d_q_in.set_row(token, &q_row);
            d_kv.set_row(token, &kv_row);
            d_k_rope.set_row(token, &rope_row);
        }
        [d_q_in, d_kv, d_k_rope].iter().try_for_each(|values| values.write(memory))
    }
}
