//! Grouped-query attention (arXiv 2305.13245): several query heads share a key and value head. Queries and keys may be
//! normalised per head before they are rotated (Qwen3).
//!
//! Queries, keys and values are one product, whose matrix holds the three projections one below the other. Saved
//! activations are as in [`super::mla`]: loaded, or computed from the ones before them.

use dropless_core::ops::{CopyColumns, Pairs, Rotary};
use dropless_core::{Backend, Result, Tensor};

use super::softmax::{Heads, SoftmaxSaved};
use crate::cache::{Kept, NewRows, copy_rows};
use crate::context::{Context, alloc, sum};
use crate::nn::quantized::{FORWARD, WGRAD};
use crate::nn::{Linear, Norm, Normed};
use crate::params::{Builder, Id};
use crate::single;
use crate::weights::Weights;

/// The extents of grouped-query attention, and its variants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides the query heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether queries and keys are normalised, each head with the same weight.
    pub qk_norm: bool,
    /// How the columns of a head form rotary pairs.
    pub pairs: Pairs,
}

impl Config {
    fn columns(&self) -> [usize; 3] {
        [self.heads, self.kv_heads, self.kv_heads].map(|heads| heads * self.head_dim)
    }

    pub(super) fn parameters(&self, h: usize) -> f64 {
        let [h, heads, kv_heads, dim] = [h, self.heads, self.kv_heads, self.head_dim].map(|n| n as f64);
        2.0 * (heads + kv_heads) * dim * h
    }

    pub(super) fn check(&self) -> std::result::Result<(), String> {
        let &Config { heads, kv_heads, head_dim, .. } = self;
        if !head_dim.is_multiple_of(2) {
            return Err(format!("head_dim is {head_dim}, but rotary positions turn pairs"));
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "num_key_value_heads is {kv_heads}, which does not divide num_attention_heads, {heads}"
            ));
        }
        Ok(())
    }

    pub(super) fn describe(&self, builder: &mut Builder, h: usize, layer: usize) -> Description {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let [q, k, v] = self.columns();
        let norm = builder.norm(name("input_layernorm"), h);
        let parts = [("self_attn.q_proj", q), ("self_attn.k_proj", k), ("self_attn.v_proj", v)];
        let qkv = builder.stacked(parts.map(|(part, rows)| (name(part), rows)).to_vec(), h);
        let qk_norm = self.qk_norm.then(|| {
            let d = self.head_dim;
            [builder.norm(name("self_attn.q_norm"), d), builder.norm(name("self_attn.k_norm"), d)]
        });
        Description { norm, qkv, qk_norm, output: builder.matrix(name("self_attn.o_proj"), &[h, q]) }
    }
}

/// The parameters, by their place in the arenas.
#[derive(Debug)]
pub(crate) struct Description {
    norm: Id,
    qkv: Id,
    qk_norm: Option<[Id; 2]>,
    output: Id,
}

impl Description {
    pub(super) fn linear(&self) -> Vec<Id> {
        vec![self.qkv, self.output]
    }

    pub(super) fn build(&self, config: &Config, eps: f32, weights: Weights<'_>) -> Result<Gqa> {
        let &Config { heads, kv_heads, head_dim, .. } = config;
        let scale = single(1.0 / libm::sqrt(head_dim as f64));
        Ok(Gqa {
            norm: weights.norm(self.norm, eps)?,
            qkv: weights.linear(self.qkv)?,
            qk_norm: match self.qk_norm {
                None => None,
                Some([q, k]) => Some([weights.norm(q, eps)?, weights.norm(k, eps)?]),
            },
            output: weights.linear(self.output)?,
            columns: config.columns(),
            heads: Heads { heads, kv_heads, qk_dim: head_dim, v_dim: head_dim, scale },
            pairs: config.pairs,
        })
    }
}

/// Grouped-query attention with its norm and its residual.
#[derive(Debug)]
pub(crate) struct Gqa {
    norm: Norm,
    qkv: Linear,
    qk_norm: Option<[Norm; 2]>,
    output: Linear,
    /// Of queries, keys and values.
    columns: [usize; 3],
    heads: Heads,
    pairs: Pairs,
}

/// What the backward pass needs. Queries and keys before their norms are kept with the projected ones.
#[derive(Debug)]
pub(crate) struct Saved {
    x: Tensor,
    normed: Normed,
    /// Queries and keys as projected, where norms follow, each head a row, with the norms' statistics.
    projected: [crate::nn::Saved; 2],
    rstd: Option<[Tensor; 2]>,
    softmax: SoftmaxSaved,
}

impl Saved {
    fn new(x: Tensor) -> Saved {
        let (normed, softmax) = (Normed::default(), SoftmaxSaved::default());
        Saved { x, normed, projected: Default::default(), rstd: None, softmax }
    }

    pub(super) fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        self.softmax.prefetch(backend)?;
        self.projected.iter_mut().try_for_each(|p| p.prefetch(backend))?;
        self.normed.prefetch(backend)
    }
}

impl Gqa {
    pub(super) fn prepare(&mut self, backend: &dyn Backend) -> Result<()> {
        self.qkv.prepare(backend)?;
        self.output.prepare(backend)
    }

    /// The output projection.
    fn output(&self, c: Context<'_>, out: &Tensor) -> Result<Tensor> {
        self.output.forward(c.backend, c.tokens, &self.output.recipe.rows(c.backend, c.tokens, out, FORWARD)?)
    }

    fn normed(&self, c: Context<'_>, s: &mut Saved) -> Result<Tensor> {
        s.normed.get(c.backend, &self.norm, &s.x)
    }

    /// Queries, keys and values as projected, `[tokens, columns]` each.
    fn project(&self, c: Context<'_>, s: &mut Saved) -> Result<[Tensor; 3]> {
        let normed = self.normed(c, s)?;
        let x = self.qkv.recipe.rows(c.backend, c.tokens, &normed, FORWARD)?;
        let all = self.qkv.forward(c.backend, c.tokens, &x)?;
        let mut x_column = 0;
        let mut part = |width: usize| -> Result<Tensor> {
            let out = alloc(c.backend, all.dtype(), &[all.rows(), width])?;
            CopyColumns { x: &all, x_column, out: &out, out_column: 0, width }.run(c.backend)?;
            x_column += width;
            Ok(out)
        };
        let [q, k, v] = self.columns;
        Ok([part(q)?, part(k)?, part(v)?])
    }

    /// `[tokens, heads * dim]` as `[tokens * heads, dim]`.
    fn by_head(&self, x: &Tensor) -> Result<Tensor> {
        let dim = self.heads.qk_dim;
        x.reshape(&[x.len() / dim, dim])
    }

    fn rotate(&self, c: Context<'_>, x: &Tensor, inverse: bool) -> Result<Tensor> {
        let out = alloc(c.backend, x.dtype(), x.shape())?;
        let (positions, cos, sin) = (&c.inputs.positions, &c.rope.cos, &c.rope.sin);
        Rotary { x, positions, cos, sin, pairs: self.pairs, inverse, out: &out }.run(c.backend)?;
        Ok(out)
    }

    fn qkv(&self, c: Context<'_>, s: &mut Saved) -> Result<[Tensor; 3]> {
        if let Some(qkv) = s.softmax.qkv(c.backend)? {
            return Ok(qkv);
        }
        let [q, k, v] = self.project(c, s)?;
        let [q, k] = match &self.qk_norm {
            None => [q, k],
            Some([q_norm, k_norm]) => {
                let (shape_q, shape_k) = (q.shape().to_vec(), k.shape().to_vec());
                let [q, k] = [self.by_head(&q)?, self.by_head(&k)?];
                let (q_out, q_rstd) = q_norm.forward(c.backend, &q)?;
                let (k_out, k_rstd) = k_norm.forward(c.backend, &k)?;
                for (saved, x) in s.projected.iter_mut().zip([q, k]) {
                    saved.set(x);
                }
                s.rstd = Some([q_rstd, k_rstd]);
                [q_out.reshape(&shape_q)?, k_out.reshape(&shape_k)?]
            }
        };
        let [q, k] = [self.rotate(c, &q, false)?, self.rotate(c, &k, false)?];
        Ok(s.softmax.set_qkv([q, k, v]))
    }

    /// Queries and keys as the norms took them, `[tokens * heads, dim]`.
    fn projected(&self, c: Context<'_>, s: &mut Saved) -> Result<[Tensor; 2]> {
        let [q, k] = &mut s.projected;
        if let (Some(q), Some(k)) = (q.load(c.backend)?, k.load(c.backend)?) {
            return Ok([q, k]);
        }
        let [q, k, _] = self.project(c, s)?;
        Ok([self.by_head(&q)?, self.by_head(&k)?])
    }

    fn attended(&self, c: Context<'_>, s: &mut Saved) -> Result<Tensor> {
        if let Some(out) = s.softmax.out(c.backend)? {
            return Ok(out);
        }
        let qkv = self.qkv(c, s)?;
        s.softmax.attended(c, self.heads, &qkv)
    }

    pub(super) fn forward(&self, c: Context<'_>, x: Tensor) -> Result<(Tensor, Saved)> {
        let mut s = Saved::new(x);
        let out = self.attended(c, &mut s)?;
        let y = self.output(c, &out)?;
        let y = sum(c.backend, &s.x, &y)?;
        s.normed.settle(c.backend, c.policy.attention_input)?;
        s.projected.iter_mut().try_for_each(|p| p.settle(c.backend, c.policy.qkv))?;
        s.softmax.settle(c)?;
        Ok((y, s))
    }

    pub(super) fn cached_widths(&self) -> [usize; 2] {
        [self.columns[1], self.columns[2]]
    }

    pub(super) fn decode(&self, c: Context<'_>, x: &Tensor, rows: &[NewRows], kept: &[Kept]) -> Result<Tensor> {
        let mut s = Saved::new(x.clone());
        let [q, k, v] = self.qkv(c, &mut s)?;
        let out = alloc(c.backend, q.dtype(), q.shape())?;
        for (rows, [keys, values]) in rows.iter().zip(kept).filter(|(rows, _)| rows.count > 0) {
            let (keys, values) = (rows.keep(c.backend, &k, keys)?, rows.keep(c.backend, &v, values)?);
            let attended = self.heads.last_rows(c.backend, &rows.of(&q)?, &keys, &values)?;
            copy_rows(c.backend, &attended, &rows.of(&out)?)?;
        }
        let y = self.output(c, &out)?;
        sum(c.backend, x, &y)
    }

    pub(super) fn backward(&self, c: Context<'_>, dy: &Tensor, mut s: Saved) -> Result<Tensor> {
        let (b, t, element) = (c.backend, c.tokens, dy.dtype());
        let qkv = self.qkv(c, &mut s)?;
        let out = self.attended(c, &mut s)?;
        let d_out = self.output.backward(b, t, dy, &self.output.recipe.rows(b, t, &out, WGRAD)?)?;
        let [d_q, d_k, d_v] = s.softmax.backward(c, self.heads, &qkv, &out, &d_out)?;
        let [mut d_q, mut d_k] = [self.rotate(c, &d_q, true)?, self.rotate(c, &d_k, true)?];
        if let Some([q_norm, k_norm]) = &self.qk_norm {
            let [q, k] = self.projected(c, &mut s)?;
            let [q_rstd, k_rstd] = s.rstd.as_ref().expect("a backward pass follows a forward pass");
            let (by_q, by_k) = (self.by_head(&d_q)?, self.by_head(&d_k)?);
            d_q = q_norm.backward(b, &q, q_rstd, &by_q, None)?.reshape(d_q.shape())?;
            d_k = k_norm.backward(b, &k, k_rstd, &by_k, None)?.reshape(d_k.shape())?;
        }
        let all = alloc(b, element, &[t.count(), self.columns.iter().sum()])?;
        let mut out_column = 0;
        for (x, width) in [&d_q, &d_k, &d_v].into_iter().zip(self.columns) {
            CopyColumns { x, x_column: 0, out: &all, out_column, width }.run(b)?;
            out_column += width;
        }
        let normed = self.normed(c, &mut s)?;
        let d_normed = self.qkv.backward(b, t, &all, &self.qkv.recipe.rows(b, t, &normed, WGRAD)?)?;
        s.normed.backward(b, &self.norm, &s.x, &d_normed, Some(dy))
    }
}
