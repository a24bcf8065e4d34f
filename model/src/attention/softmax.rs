//! Softmax attention between projections, with the activations that its backward pass needs.

use dropless_core::ops::{Attention, AttentionBackward, AttentionForward, AttentionShape, Fill};
use dropless_core::{Backend, DType, Result, Tensor};

use crate::cache::copy_rows;
use crate::context::{Context, alloc};
use crate::nn::Saved;

/// Queries, keys and values `[tokens, heads * dim]` of a micro-batch, the result, and the log-sum-exp of each row.
#[derive(Debug, Default)]
pub(super) struct SoftmaxSaved {
    q: Saved,
    k: Saved,
    v: Saved,
    out: Saved,
    lse: Option<Tensor>,
}

/// The extents that tokens do not change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) qk_dim: usize,
    pub(super) v_dim: usize,
    /// Factor of the scores.
    pub(super) scale: f32,
}

impl Heads {
    fn shape(self, c: Context<'_>) -> AttentionShape {
        let Heads { heads, kv_heads, qk_dim, v_dim, scale } = self;
        let (batch, sequence) = (c.tokens.sequences(), c.tokens.sequence());
        AttentionShape { batch, sequence, heads, kv_heads, qk_dim, v_dim, scale }
    }

    /// The result for queries, keys and values, `[tokens, heads * v_dim]`, and the log-sum-exp, f32 `[tokens, heads]`.
    fn forward(self, c: Context<'_>, [q, k, v]: &[Tensor; 3]) -> Result<(Tensor, Tensor)> {
        let out = alloc(c.backend, v.dtype(), &[v.rows(), self.heads * self.v_dim])?;
        let lse = alloc(c.backend, DType::F32, &[v.rows(), self.heads])?;
        let (start, shape) = (Some(&c.inputs.start), self.shape(c));
        Attention::Forward(AttentionForward { q, k, v, start, out: &out, lse: &lse, shape }).run(c.backend)?;
        Ok((out, lse))
    }
}

impl Heads {
    /// The result for the last rows of a sequence, `[rows, heads * v_dim]`: queries of these rows, and keys and values of
    /// the whole sequence.
    pub(super) fn last_rows(self, backend: &dyn Backend, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let Heads { heads, kv_heads, qk_dim, v_dim, scale } = self;
        let (sequence, first) = (k.rows(), k.rows() - q.rows());
        // The op wants a query for each key. Those of earlier rows are computed for nothing.
        let all = alloc(backend, q.dtype(), &[sequence, q.cols()])?;
        Fill { out: &all, value: 0.0 }.run(backend)?;
        copy_rows(backend, q, &all.slice(first, sequence)?)?;
        let out = alloc(backend, v.dtype(), &[sequence, heads * v_dim])?;
        let lse = alloc(backend, DType::F32, &[sequence, heads])?;
        let shape = AttentionShape { batch: 1, sequence, heads, kv_heads, qk_dim, v_dim, scale };
        let op = AttentionForward { q: &all, k, v, start: None, out: &out, lse: &lse, shape };
        Attention::Forward(op).run(backend)?;
        out.slice(first, sequence)
    }
}

impl SoftmaxSaved {
    /// Queries, keys and values, if they are still there.
    pub(super) fn qkv(&mut self, backend: &dyn Backend) -> Result<Option<[Tensor; 3]>> {
        let loaded = (self.q.load(backend)?, self.k.load(backend)?, self.v.load(backend)?);
        let (Some(q), Some(k), Some(v)) = loaded else { return Ok(None) };
        Ok(Some([q, k, v]))
    }

    /// Remembers queries, keys and values, and hands them on.
    pub(super) fn set_qkv(&mut self, [q, k, v]: [Tensor; 3]) -> [Tensor; 3] {
        [self.q.set(q), self.k.set(k), self.v.set(v)]
    }

    /// The result, loaded or computed.
    pub(super) fn attended(&mut self, c: Context<'_>, heads: Heads, qkv: &[Tensor; 3]) -> Result<Tensor> {
        if let Some(out) = self.out(c.backend)? {
            return Ok(out);
        }
        let (out, lse) = heads.forward(c, qkv)?;
        self.lse = Some(lse);
        Ok(self.out.set(out))
    }

    /// The result, if it is still there.
    pub(super) fn out(&mut self, backend: &dyn Backend) -> Result<Option<Tensor>> {
        self.out.load(backend)
    }

    /// The gradients of queries, keys and values for the gradient `d_out` of the result `out`.
    pub(super) fn backward(
        &self,
        c: Context<'_>,
        heads: Heads,
        qkv: &[Tensor; 3],
        out: &Tensor,
        d_out: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let like = |x: &Tensor| alloc(c.backend, d_out.dtype(), x.shape());
        let [q, k, v] = qkv;
        let (d_q, d_k, d_v) = (like(q)?, like(k)?, like(v)?);
        Attention::Backward(AttentionBackward {
            q,
            k,
            v,
            start: Some(&c.inputs.start),
            out,
            lse: self.lse.as_ref().expect("a backward pass follows a forward pass"),
            d_out,
            d_q: &d_q,
            d_k: &d_k,
            d_v: &d_v,
            shape: heads.shape(c),
        })
        .run(c.backend)?;
        Ok([d_q, d_k, d_v])
    }

    /// Ends the forward pass: does what the policies say.
    pub(super) fn settle(&mut self, c: Context<'_>) -> Result<()> {
        for saved in [&mut self.q, &mut self.k, &mut self.v] {
            saved.settle(c.backend, c.policy.qkv)?;
        }
        self.out.settle(c.backend, c.policy.attention_output)
    }

    /// Begins to bring back what is offloaded.
    pub(super) fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        for saved in [&mut self.q, &mut self.k, &mut self.v, &mut self.out] {
            saved.prefetch(backend)?;
        }
        Ok(())
    }
}
