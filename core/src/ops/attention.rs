//! Causal softmax attention, forward and backward. NUMERICS.md, "Attention".

mod softmax;

pub(crate) use softmax::{OnlineSoftmax, differentiate, visible};

use std::ops::Range;

use super::arguments::{family, op};
use super::{Arg, Checked, DType, FLOAT, Values, distinct, number};
use crate::backend::{Backend, Caps};
use crate::error::Result;
use crate::numerics::{NumericModel, bf16, math, mma, reduce};
use crate::tensor::Tensor;

/// Keys of a tile of the online softmax, counted from the start of the sequence.
pub const KEY_TILE: usize = 128;

/// The extents of an attention, and its factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Sequences; a token attends within its own.
    pub batch: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`. Query head h uses key head `h * kv_heads / heads`.
    pub kv_heads: usize,
    /// Elements of a query or key.
    pub qk_dim: usize,
    /// Elements of a value.
    pub v_dim: usize,
    /// Factor of the scores, positive.
    pub scale: f32,
}

impl AttentionShape {
    /// scale * log2 e: a score times this is the exponent, to base 2, of its probability.
    pub fn exponent_factor(&self) -> f32 {
        self.scale * math::LOG2_E
    }

    /// Floating-point operations of a forward pass in which rows see so many keys in all: the products with keys and values.
    /// A backward pass has twice as many, since scores that it computes again do not count.
    pub fn flops(&self, pairs: usize) -> f64 {
        2.0 * (self.heads * (self.qk_dim + self.v_dim)) as f64 * pairs as f64
    }
}

/// `out = softmax(scale * q k^T) v`, causal, in tiles of 128 keys.
///
/// # Shape
/// q: `[batch * sequence, heads * qk_dim]`, k: `[.., kv_heads * qk_dim]`, v: `[.., kv_heads * v_dim]`,
/// out: `[.., heads * v_dim]`, all of one float type; lse: f32 `[.., heads]`; start: u32 `[batch * sequence]`, the first
/// key (counted within the sequence) that a row sees; the last is its own.
///
/// # Numerics
/// A product is a chain from zero under the backend's model, for f32 operands always the one of `F32`. For each row,
/// over the tiles of [`KEY_TILE`] keys in order, with m = -inf, l = 0, O = 0 at first:
/// - s = q . k along the head for the visible keys, c = scale * log2 e;
/// - m' = the larger of m and the largest s times c; alpha = ex2(m - m'), but 0 where m = -inf; p = ex2(fma(s, c, -m')),
///   or ex2(s * c - m') unless |m'| < 2^24, but 0 for the keys not visible;
/// - l = l * alpha + sum of p, in 4 lanes: lane t adds the columns c of the tile with c / 2 mod 4 = t in order from +0, and
///   the sum is (lane 0 + lane 1) + (lane 2 + lane 3);
/// - O = O * alpha, and the chain goes on with p (rounded to the operands' type) times v along the tile's keys; m = m'.
///
/// A tile without a visible key leaves the row as it is. At the end r = 1 / l, but 0 where m = -inf; out = O * r, rounded
/// once, and lse = fma(log(l), log2 e, m). A row that sees no key (its start lies past it) has out = 0 and lse = -inf.
///
/// What a row does not see never enters, infinity and NaN included. In a step that other keys of a tile share with it, its
/// product is one of zeros; and a chain along the keys that ends in -0 gives +0. So the size of row blocks does not show.
#[derive(Clone, Copy, Debug)]
pub struct AttentionForward<'a> {
    /// Queries.
    pub q: &'a Tensor,
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
    /// First visible key of each row (packed documents); 0 for all if absent.
    pub start: Option<&'a Tensor>,
    /// Result, written.
    pub out: &'a Tensor,
    /// Logarithm to base 2 of the sum of exponentials, written.
    pub lse: &'a Tensor,
    /// Extents.
    pub shape: AttentionShape,
}

op!(AttentionForward: read(q, k, v, start), write(out, lse), value(shape));

/// The gradients of [`AttentionForward`]; probabilities are recomputed from `lse`.
///
/// # Shape
/// As [`AttentionForward`]; each gradient as its value.
///
/// # Numerics
/// Products, and what is not seen, as in [`AttentionForward`]; in the gradients of a key these are the rows that do not see
/// it. For each row and visible key:
/// - delta = row reduction of d_out * out over the head's elements;
/// - p = ex2(fma(q . k, c, -lse)), or ex2((q . k) * c - lse) unless |lse| < 2^24, with c as there; dp = d_out . v, a chain
///   along the head; ds = p * (dp - delta).
///
/// With p and ds rounded to the operands' type:
/// - d_v of a key is one chain of p * d_out, and d_k = scale * (one chain of ds * q), over the query heads of its head in
///   order, and in each over the rows in order; a chain's steps begin anew at the first row of each head's sequence;
/// - d_q of a row = scale * (one chain of ds * k over the keys in order).
///
/// The factor is one f32 product at the end; each result is rounded once.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward<'a> {
    /// Queries.
    pub q: &'a Tensor,
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
    /// First visible key of each row.
    pub start: Option<&'a Tensor>,
    /// The forward result.
    pub out: &'a Tensor,
    /// The forward log-sum-exp.
    pub lse: &'a Tensor,
    /// Gradient of the result.
    pub d_out: &'a Tensor,
    /// Gradient of the queries, written.
    pub d_q: &'a Tensor,
    /// Gradient of the keys, written.
    pub d_k: &'a Tensor,
    /// Gradient of the values, written.
    pub d_v: &'a Tensor,
    /// Extents.
    pub shape: AttentionShape,
}

op!(AttentionBackward: read(q, k, v, start, out, lse, d_out), write(d_q, d_k, d_v), value(shape));

/// Attention.
#[derive(Clone, Copy, Debug)]
pub enum Attention<'a> {
    /// See [`AttentionForward`].
    Forward(AttentionForward<'a>),
    /// See [`AttentionBackward`].
    Backward(AttentionBackward<'a>),
}

const OP: &str = "attention";

family!(Attention { Forward named "attention_forward", Backward named "attention_backward" }, by attention);

/// The (name, tensor, columns) of each operand that has one row for each token.
type Rows<'a, 'b> = &'b [(&'static str, &'a Tensor, usize)];

fn check(shape: AttentionShape, start: Option<&Tensor>, lse: &Tensor, operands: Rows<'_, '_>) -> Result<()> {
    let AttentionShape { batch, sequence, heads, kv_heads, .. } = shape;
    for (field, extent) in [("heads", heads), ("qk_dim", shape.qk_dim), ("v_dim", shape.v_dim)] {
        number(OP, field, extent > 0, "at least 1", extent)?;
    }
    number(OP, "scale", shape.scale > 0.0 && shape.scale.is_finite(), "positive and finite", shape.scale)?;
    number(
        OP,
        "kv_heads",
        kv_heads > 0 && heads.is_multiple_of(kv_heads),
        &format!("a divisor of the {heads} heads"),
        kv_heads,
    )?;
    let tokens = batch * sequence;
    let dtype = operands[0].1.dtype();
    for &(field, tensor, cols) in operands {
        Arg::new(OP, field, tensor).dtype(FLOAT)?.dtype(&[dtype])?.shape(&[tokens, cols], "[tokens, heads * dim]")?;
    }
    Arg::new(OP, "lse", lse).dtype(&[DType::F32])?.shape(&[tokens, heads], "[tokens, heads]")?;
    if let Some(start) = start {
        Arg::new(OP, "start", start).dtype(&[DType::U32])?.len(tokens, "one for each token")?;
    }
    Ok(())
}

impl Attention<'_> {
    /// Checks the arguments.
    ///
    /// # Errors
    /// [`crate::Error::Argument`].
    pub fn check(self, _caps: &Caps) -> Result<Checked<Self>> {
        match &self {
            Attention::Forward(op) => {
                let s = op.shape;
                check(
                    s,
                    op.start,
                    op.lse,
                    &[
                        ("q", op.q, s.heads * s.qk_dim),
                        ("k", op.k, s.kv_heads * s.qk_dim),
                        ("v", op.v, s.kv_heads * s.v_dim),
                        ("out", op.out, s.heads * s.v_dim),
                    ],
                )?;
                let mut inputs = vec![op.q, op.k, op.v];
                inputs.extend(op.start);
                distinct(OP, "lse", op.lse, &inputs)?;
                inputs.push(op.lse);
                distinct(OP, "out", op.out, &inputs)?;
            }
            Attention::Backward(op) => {
                let s = op.shape;
                check(
                    s,
                    op.start,
                    op.lse,
                    &[
                        ("q", op.q, s.heads * s.qk_dim),
                        ("k", op.k, s.kv_heads * s.qk_dim),
                        ("v", op.v, s.kv_heads * s.v_dim),
                        ("out", op.out, s.heads * s.v_dim),
                        ("d_out", op.d_out, s.heads * s.v_dim),
                        ("d_q", op.d_q, s.heads * s.qk_dim),
                        ("d_k", op.d_k, s.kv_heads * s.qk_dim),
                        ("d_v", op.d_v, s.kv_heads * s.v_dim),
                    ],
                )?;
                let mut inputs = vec![op.q, op.k, op.v, op.out, op.lse, op.d_out];
                inputs.extend(op.start);
                for (field, out) in [("d_q", op.d_q), ("d_k", op.d_k), ("d_v", op.d_v)] {
                    distinct(OP, field, out, &inputs)?;
                    inputs.push(out);
                }
            }
        }
        Ok(Checked::new(self))
    }

    /// Checks and queues.
    ///
    /// # Errors
    /// [`crate::Error::Argument`]; a failure of the device.
    pub fn run(self, backend: &dyn Backend) -> Result<()> {
        let _span = tracing::trace_span!(OP).entered();
        backend.attention(&self.check(backend.caps())?)
    }
}

/// A tensor `[tokens, heads * dim]`, read for the specification.
struct Heads<'a> {
    values: Values<'a>,
    sequence: usize,
    dim: usize,
}

impl<'a> Heads<'a> {
    fn read(memory: &dyn Backend, tensor: &'a Tensor, shape: AttentionShape, dim: usize) -> Result<Heads<'a>> {
        Ok(Heads { values: Values::read(memory, tensor)?, sequence: shape.sequence, dim })
    }

    /// First element of a head of a row.
    fn at(&self, batch: usize, row: usize, head: usize) -> usize {
        (batch * self.sequence + row) * self.values.cols() + head * self.dim
    }

    /// A head of a row.
    fn row(&self, batch: usize, row: usize, head: usize) -> Vec<f32> {
        let at = self.at(batch, row, head);
        (at..at + self.dim).map(|i| self.values.float(i)).collect()
    }

    /// Element i of a head in those of the rows that are seen, and 0 in the others.
    fn column(
        &self,
        batch: usize,
        head: usize,
        i: usize,
        rows: Range<usize>,
        seen: impl Fn(usize) -> bool,
    ) -> Vec<f32> {
        rows.map(|row| if seen(row) { self.values.float(self.at(batch, row, head) + i) } else { 0.0 }).collect()
    }

    fn set_row(&mut self, batch: usize, row: usize, head: usize, values: &[f32]) {
        let at = self.at(batch, row, head);
        values.iter().enumerate().for_each(|(i, &value)| self.values.set_float(at + i, value));
    }

    /// `acc + a[0] b[0] + ..` under a model, the factors rounded to the type of this tensor.
    fn chain(&self, model: NumericModel, a: &[f32], b: &[f32], acc: f32) -> f32 {
        let codes = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
        match self.values.dtype() {
            DType::F32 => mma::dot_f32(a, b, acc),
            _ => mma::dot_bf16(model, &codes(a), &codes(b), acc),
        }
    }
}

/// The first key that each token sees, within its sequence.
fn starts(memory: &dyn Backend, start: Option<&Tensor>, tokens: usize) -> Result<Vec<usize>> {
    let starts = Values::read_opt(memory, start)?;
    Ok((0..tokens).map(|token| starts.as_ref().map_or(0, |starts| starts.word(token) as usize)).collect())
}

impl AttentionForward<'_> {
    /// The specification.
    fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let AttentionShape { batch, sequence, heads, kv_heads, qk_dim, v_dim, .. } = self.shape;
        let (model, factor) = (memory.caps().numerics, self.shape.exponent_factor());
        let read = |tensor, dim| Heads::read(memory, tensor, self.shape, dim);
        let (q, k, v) = (read(self.q, qk_dim)?, read(self.k, qk_dim)?, read(self.v, v_dim)?);
        let starts = starts(memory, self.start, batch * sequence)?;
        let (mut out, mut lse) = (read(self.out, v_dim)?, read(self.lse, 1)?);
        for (batch, row) in (0..batch).flat_map(|batch| (0..sequence).map(move |row| (batch, row))) {
            for head in 0..heads {
                let (kv_head, query) = (head * kv_heads / heads, q.row(batch, row, head));
                let (mut softmax, mut sums) = (OnlineSoftmax::EMPTY, vec![0.0; v_dim]);
                for first in (0..=row).step_by(KEY_TILE) {
                    let tile = first..(row + 1).min(first + KEY_TILE);
                    let seen = visible(row, starts[batch * sequence + row], &tile);
                    if seen.is_empty() {
                        continue;
                    }
                    let score = |key| match seen.contains(&(key - first)) {
                        true => q.chain(model, &query, &k.row(batch, key, kv_head), 0.0),
                        false => 0.0,
                    };
                    let mut p: Vec<f32> = tile.clone().map(score).collect();
                    let alpha = softmax.advance(factor, &mut p, seen.clone());
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let values = v.column(batch, kv_head, i, tile.clone(), |key| seen.contains(&(key - first)));
                        *sum = v.chain(model, &p, &values, *sum * alpha);
                    }
                }
                lse.set_row(batch, row, head, &[softmax.finish(&mut sums)]);
                out.set_row(batch, row, head, &sums);
            }
        }
        out.values.write(memory)?;
        lse.values.write(memory)
    }
}

impl AttentionBackward<'_> {
    /// The specification.
    fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let AttentionShape { batch, sequence, heads, kv_heads, qk_dim, v_dim, scale } = self.shape;
        let (model, group, factor) = (memory.caps().numerics, heads / kv_heads, self.shape.exponent_factor());
        let read = |tensor, dim| Heads::read(memory, tensor, self.shape, dim);
        let (q, k, v) = (read(self.q, qk_dim)?, read(self.k, qk_dim)?, read(self.v, v_dim)?);
        let (out, lse, d_out) = (read(self.out, v_dim)?, read(self.lse, 1)?, read(self.d_out, v_dim)?);
        let starts = starts(memory, self.start, batch * sequence)?;
        let (mut d_q, mut d_k, mut d_v) = (read(self.d_q, qk_dim)?, read(self.d_k, qk_dim)?, read(self.d_v, v_dim)?);
        for (batch, kv_head) in (0..batch).flat_map(|batch| (0..kv_heads).map(move |kv_head| (batch, kv_head))) {
            let sees = |row: usize, key: usize| starts[batch * sequence + row] <= key && key <= row;
            // The sums of each key, which go on from head to head.
            let (mut k_sums, mut v_sums) = (vec![vec![0.0; qk_dim]; sequence], vec![vec![0.0; v_dim]; sequence]);
            for head in kv_head * group..(kv_head + 1) * group {
                // `[row, key]`, the keys up to the row's own.
                let (mut p, mut ds) = (Vec::new(), Vec::new());
                for row in 0..sequence {
                    let (query, d) = (q.row(batch, row, head), d_out.row(batch, row, head));
                    let result = out.row(batch, row, head);
                    let delta = reduce::row(v_dim, |i| d[i] * result[i]);
                    let keys = 0..row + 1;
                    let product = |a: &Heads<'_>, of_row: &[f32], b: &Heads<'_>, key| match sees(row, key) {
                        true => a.chain(model, of_row, &b.row(batch, key, kv_head), 0.0),
                        false => 0.0,
                    };
                    let mut p_row: Vec<f32> = keys.clone().map(|key| product(&q, &query, &k, key)).collect();
                    let mut ds_row: Vec<f32> = keys.clone().map(|key| product(&v, &d, &v, key)).collect();
                    let seen = visible(row, starts[batch * sequence + row], &keys);
                    differentiate(factor, lse.row(batch, row, head)[0], delta, &mut p_row, &mut ds_row, seen);
                    let d_query = |i| {
                        let keys = k.column(batch, kv_head, i, keys.clone(), |key| sees(row, key));
                        (k.chain(model, &ds_row, &keys, 0.0) + 0.0) * scale
                    };
                    d_q.set_row(batch, row, head, &(0..qk_dim).map(d_query).collect::<Vec<_>>());
                    p.push(p_row);
                    ds.push(ds_row);
                }
                for key in 0..sequence {
                    let of_key = |all: &[Vec<f32>]| {
                        all.iter().map(|row| row.get(key).copied().unwrap_or(0.0)).collect::<Vec<_>>()
                    };
                    let (p, ds) = (of_key(&p), of_key(&ds));
                    for (i, sum) in k_sums[key].iter_mut().enumerate() {
                        let queries = q.column(batch, head, i, 0..sequence, |row| sees(row, key));
                        *sum = q.chain(model, &ds, &queries, *sum);
                    }
                    for (i, sum) in v_sums[key].iter_mut().enumerate() {
                        let gradients = d_out.column(batch, head, i, 0..sequence, |row| sees(row, key));
                        *sum = d_out.chain(model, &p, &gradients, *sum);
                    }
                }
            }
            for (key, (k_sums, v_sums)) in k_sums.iter().zip(&v_sums).enumerate() {
                let scaled = k_sums.iter().map(|sum| (sum + 0.0) * scale).collect::<Vec<_>>();
                d_k.set_row(batch, key, kv_head, &scaled);
                d_v.set_row(batch, key, kv_head, &v_sums.iter().map(|sum| sum + 0.0).collect::<Vec<_>>());
            }
        }
        [d_q, d_k, d_v].iter().try_for_each(|heads| heads.values.write(memory))
    }
}
