//! Causal softmax attention, forward and backward. NUMERICS.md, "Attention".

mod softmax;

pub(crate) use softmax::{OnlineSoftmax, differentiate, visible};

use super::arguments::{family, op};
use super::{Arg, Checked, DType, FLOAT, distinct, number};
use crate::backend::{Backend, Caps};
use crate::error::Result;
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
    /// Factor of the scores.
    pub scale: f32,
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
/// - s = (q . k along the head) * scale for the visible keys;
/// - m' = the larger of m and the largest s; alpha = exp(m - m'), but 0 where m = -inf; p = exp(s - m'), but 0 for the keys
///   not visible;
/// - l = l * alpha + sum of p, in 4 lanes: lane t adds the columns c of the tile with c / 2 mod 4 = t in order from +0, and
///   the sum is (lane 0 + lane 1) + (lane 2 + lane 3);
/// - O = O * alpha, and the chain goes on with p (rounded to the operands' type) times v along the tile's keys; m = m'.
///
/// A tile without a visible key leaves the row as it is. At the end out = O / l, rounded once, and lse = m + log(l). A row
/// that sees no key (its start lies past it) has out = 0 and lse = -inf.
///
/// Terms with p = 0 change no bit of a chain of finite values: a zero product neither moves the grid of a step nor adds
/// to it. So an implementation may skip them, and the size of its row blocks does not show. It does show where v is
/// infinite or NaN at a key that the row does not see, and in the sign of a sum all of whose terms underflow.
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
    /// Natural logarithm of the sum of exponentials, written.
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
/// Products and zero terms as in [`AttentionForward`]. For each row and visible key:
/// - delta = row reduction of d_out * out over the head's elements;
/// - p = exp((q . k) * scale - lse); dp = d_out . v, a chain along the head; ds = p * (dp - delta).
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

family!(Attention { Forward, Backward }, named |_| OP, by attention);

/// The (name, tensor, columns) of each operand that has one row for each token.
type Rows<'a, 'b> = &'b [(&'static str, &'a Tensor, usize)];

fn check(shape: AttentionShape, start: Option<&Tensor>, lse: &Tensor, operands: Rows<'_, '_>) -> Result<()> {
    let AttentionShape { batch, sequence, heads, kv_heads, .. } = shape;
    for (field, extent) in [("heads", heads), ("qk_dim", shape.qk_dim), ("v_dim", shape.v_dim)] {
        number(OP, field, extent > 0, "at least 1", extent)?;
    }
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
