//! Causal softmax attention, forward and backward. NUMERICS.md, "Attention".

use super::{Arg, Checked, DType, FLOAT, distinct, number};
use crate::backend::{Backend, Caps};
use crate::error::Result;
use crate::tensor::Tensor;

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
/// key (counted within the sequence, at most the row's own index) that a row sees.
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

/// The gradients of [`AttentionForward`]; probabilities are recomputed from `lse`.
///
/// # Shape
/// As [`AttentionForward`]; each gradient as its value.
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

/// Attention.
#[derive(Clone, Copy, Debug)]
pub enum Attention<'a> {
    /// See [`AttentionForward`].
    Forward(AttentionForward<'a>),
    /// See [`AttentionBackward`].
    Backward(AttentionBackward<'a>),
}

const OP: &str = "attention";

/// The (name, tensor, columns) of each operand that has one row for each token.
type Rows<'a, 'b> = &'b [(&'static str, &'a Tensor, usize)];

fn check(shape: AttentionShape, start: Option<&Tensor>, lse: &Tensor, operands: Rows<'_, '_>) -> Result<()> {
    let AttentionShape { batch, sequence, heads, kv_heads, .. } = shape;
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
