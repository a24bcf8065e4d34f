//! Multi-head latent attention (arXiv 2405.04434, section 2.1): low-rank queries, keys and values, and a rotary part that
//! all heads' keys share.
//!
//! Each activation that the backward pass needs has a function here that loads it, or computes it from the ones before
//! it and saves it. The forward pass calls the last of them; so does a backward pass after recomputation was asked for.

use dropless_core::nn::{Saved, Tokens, Weight, dgrad, forward, wgrad};
use dropless_core::ops::{
    Attention as AttentionOp, AttentionBackward, AttentionForward, AttentionShape, CopyColumns, Mla, MlaGrad, MlaShape,
    RmsNorm, RmsNormGrad,
};
use dropless_core::{Backend, DType, Tensor};

use super::layer::LayerPolicy;
use super::params::{Builder, Id, Params};
use super::rope::{Tables, softmax_scale};
use super::{Inputs, alloc, eps, sum};
use crate::config::ModelConfig;
use crate::error::Result;

/// The weight of an RMSNorm, f32 `[columns]`, with its gradient `[shards, columns]`.
#[derive(Debug)]
pub(super) struct Gain {
    weight: Weight,
    eps: f32,
}

impl Gain {
    pub(super) fn new(params: &Params, id: Id, eps: f32) -> Gain {
        Gain { weight: params.weight(id), eps }
    }

    /// The normalised rows and their reciprocal root mean squares.
    pub(super) fn forward(&self, backend: &dyn Backend, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let out = alloc(backend, x.dtype(), x.shape())?;
        let rstd = alloc(backend, DType::F32, &[x.rows()])?;
        RmsNorm { x, weight: &self.weight.value, eps: self.eps, out: &out, rstd: &rstd }.run(backend)?;
        Ok((out, rstd))
    }

    /// The gradient of x, plus `residual`; adds to the gain's gradient.
    pub(super) fn backward(
        &self,
        backend: &dyn Backend,
        x: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let dx = alloc(backend, x.dtype(), x.shape())?;
        let (weight, d_weight) = (&self.weight.value, &self.weight.grad);
        RmsNormGrad { dy, x, weight, rstd, residual, dx: &dx, d_weight }.run(backend)?;
        Ok(dx)
    }
}

/// A norm's output that may be dropped, with the statistics that stay.
#[derive(Debug, Default)]
pub(super) struct Normed {
    out: Saved,
    rstd: Option<Tensor>,
}

impl Normed {
    pub(super) fn get(&mut self, backend: &dyn Backend, gain: &Gain, x: &Tensor) -> Result<Tensor> {
        if let Some(out) = self.out.load(backend)? {
            return Ok(out);
        }
        let (out, rstd) = gain.forward(backend, x)?;
        self.rstd = Some(rstd);
        Ok(self.out.set(out))
    }

    pub(super) fn settle(&mut self, backend: &dyn Backend, policy: dropless_core::nn::Policy) -> Result<()> {
        Ok(self.out.settle(backend, policy)?)
    }

    pub(super) fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        Ok(self.out.prefetch(backend)?)
    }

    /// The gradient of x; the statistics are those of the forward pass.
    pub(super) fn backward(
        &self,
        backend: &dyn Backend,
        gain: &Gain,
        x: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let rstd = self.rstd.as_ref().expect("a backward pass follows a forward pass");
        gain.backward(backend, x, rstd, dy, residual)
    }
}

/// The parameters of an attention, by their place in the arenas.
pub(super) struct Description {
    norm: Id,
    /// Down projection and norm of the queries, if they are low-rank.
    q_a: Option<(Id, Id)>,
    q_b: Id,
    kv_a: Id,
    kv_norm: Id,
    kv_b: Id,
    output: Id,
}

pub(super) fn describe(builder: &mut Builder<'_>, model: &ModelConfig, layer: usize) -> Description {
    let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
    let (h, heads) = (model.hidden_size, model.num_attention_heads);
    let (nope, rope, v) = (model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim);
    let (q_rank, kv_rank) = (model.q_lora_rank, model.kv_lora_rank);
    let norm = builder.gain(&name("input_layernorm"), h);
    let (q_a, q_b) = if q_rank == 0 {
        (None, builder.matrix(&name("self_attn.q_proj"), &[heads * (nope + rope), h]))
    } else {
        let down = builder.matrix(&name("self_attn.q_a_proj"), &[q_rank, h]);
        let gain = builder.gain(&name("self_attn.q_a_layernorm"), q_rank);
        (Some((down, gain)), builder.matrix(&name("self_attn.q_b_proj"), &[heads * (nope + rope), q_rank]))
    };
    Description {
        norm,
        q_a,
        q_b,
        kv_a: builder.matrix(&name("self_attn.kv_a_proj_with_mqa"), &[kv_rank + rope, h]),
        kv_norm: builder.gain(&name("self_attn.kv_a_layernorm"), kv_rank),
        kv_b: builder.matrix(&name("self_attn.kv_b_proj"), &[heads * (nope + v), kv_rank]),
        output: builder.matrix(&name("self_attn.o_proj"), &[h, heads * v]),
    }
}

/// Attention with its norm and its residual: `x + o(attention(norm(x)))`.
#[derive(Debug)]
pub(super) struct Attention {
    norm: Gain,
    q_a: Option<(Weight, Gain)>,
    q_b: Weight,
    kv_a: Weight,
    kv_norm: Gain,
    kv_b: Weight,
    output: Weight,
    mla: MlaShape,
    scale: f32,
}

/// What the backward pass needs. The low-rank latents and the per-row statistics are small and always kept.
#[derive(Debug)]
pub(super) struct AttentionSaved {
    x: Tensor,
    normed: Normed,
    q_latent: Option<Tensor>,
    q_normed: Normed,
    kv_latent: Option<(Tensor, Tensor)>,
    kv_normed: Normed,
    q: Saved,
    k: Saved,
    v: Saved,
    out: Saved,
    lse: Option<Tensor>,
}

impl AttentionSaved {
    fn new(x: Tensor) -> AttentionSaved {
        AttentionSaved {
            x,
            normed: Normed::default(),
            q_latent: None,
            q_normed: Normed::default(),
            kv_latent: None,
            kv_normed: Normed::default(),
            q: Saved::default(),
            k: Saved::default(),
            v: Saved::default(),
            out: Saved::default(),
            lse: None,
        }
    }
}

impl AttentionSaved {
    /// Begins to bring back what is offloaded, in the order in which the backward pass takes it.
    pub(super) fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        for saved in [&mut self.q, &mut self.k, &mut self.v, &mut self.out] {
            saved.prefetch(backend)?;
        }
        for normed in [&mut self.kv_normed, &mut self.q_normed, &mut self.normed] {
            normed.prefetch(backend)?;
        }
        Ok(())
    }
}

/// One micro-step as attention sees it.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) backend: &'a dyn Backend,
    pub(super) tokens: &'a Tokens,
    pub(super) inputs: &'a Inputs,
    pub(super) rope: &'a Tables,
}

impl Attention {
    pub(super) fn new(model: &ModelConfig, params: &Params, d: &Description) -> Attention {
        let gain = |id| Gain::new(params, id, eps(model));
        Attention {
            norm: gain(d.norm),
            q_a: d.q_a.map(|(down, norm)| (params.weight(down), gain(norm))),
            q_b: params.weight(d.q_b),
            kv_a: params.weight(d.kv_a),
            kv_norm: gain(d.kv_norm),
            kv_b: params.weight(d.kv_b),
            output: params.weight(d.output),
            mla: MlaShape {
                heads: model.num_attention_heads,
                nope: model.qk_nope_head_dim,
                rope: model.qk_rope_head_dim,
                v: model.v_head_dim,
            },
            scale: softmax_scale(model),
        }
    }

    fn shape(&self, tokens: &Tokens) -> AttentionShape {
        AttentionShape {
            batch: tokens.sequences(),
            sequence: tokens.sequence(),
            heads: self.mla.heads,
            kv_heads: self.mla.heads,
            qk_dim: self.mla.nope + self.mla.rope,
            v_dim: self.mla.v,
            scale: self.scale,
        }
    }

    fn normed(&self, c: Context<'_>, s: &mut AttentionSaved) -> Result<Tensor> {
        s.normed.get(c.backend, &self.norm, &s.x)
    }

    /// The input of the query up projection.
    fn q_input(&self, c: Context<'_>, s: &mut AttentionSaved) -> Result<Tensor> {
        let Some((down, gain)) = &self.q_a else { return self.normed(c, s) };
        let latent = match &s.q_latent {
            Some(latent) => latent.clone(),
            None => {
                let normed = self.normed(c, s)?;
                forward(c.backend, c.tokens, &normed, down, normed.dtype())?
            }
        };
        s.q_latent = Some(latent.clone());
        s.q_normed.get(c.backend, gain, &latent)
    }

    /// The latent of keys and values, and the rotary key, as projected.
    fn kv_latent(&self, c: Context<'_>, s: &mut AttentionSaved) -> Result<(Tensor, Tensor)> {
        if let Some((latent, k_rope)) = &s.kv_latent {
            return Ok((latent.clone(), k_rope.clone()));
        }
        let normed = self.normed(c, s)?;
        let both = forward(c.backend, c.tokens, &normed, &self.kv_a, normed.dtype())?;
        let (t, rank) = (both.rows(), both.cols() - self.mla.rope);
        let latent = alloc(c.backend, both.dtype(), &[t, rank])?;
        let k_rope = alloc(c.backend, both.dtype(), &[t, self.mla.rope])?;
        CopyColumns { x: &both, x_column: 0, out: &latent, out_column: 0, width: rank }.run(c.backend)?;
        CopyColumns { x: &both, x_column: rank, out: &k_rope, out_column: 0, width: self.mla.rope }.run(c.backend)?;
        s.kv_latent = Some((latent.clone(), k_rope.clone()));
        Ok((latent, k_rope))
    }

    fn kv_normed(&self, c: Context<'_>, s: &mut AttentionSaved) -> Result<Tensor> {
        let (latent, _) = self.kv_latent(c, s)?;
        s.kv_normed.get(c.backend, &self.kv_norm, &latent)
    }

    fn qkv(&self, c: Context<'_>, s: &mut AttentionSaved) -> Result<[Tensor; 3]> {
        if let (Some(q), Some(k), Some(v)) = (s.q.load(c.backend)?, s.k.load(c.backend)?, s.v.load(c.backend)?) {
            return Ok([q, k, v]);
        }
        let q_input = self.q_input(c, s)?;
        let q_in = forward(c.backend, c.tokens, &q_input, &self.q_b, q_input.dtype())?;
        let kv_normed = self.kv_normed(c, s)?;
        let kv = forward(c.backend, c.tokens, &kv_normed, &self.kv_b, q_in.dtype())?;
        let (_, k_rope) = self.kv_latent(c, s)?;
        let q = alloc(c.backend, q_in.dtype(), q_in.shape())?;
        let k = alloc(c.backend, q_in.dtype(), q_in.shape())?;
        let v = alloc(c.backend, q_in.dtype(), &[q_in.rows(), self.mla.heads * self.mla.v])?;
        Mla {
            q_in: &q_in,
            kv: &kv,
            k_rope: &k_rope,
            positions: &c.inputs.positions,
            cos: &c.rope.cos,
            sin: &c.rope.sin,
            q: &q,
            k: &k,
            v: &v,
            shape: self.mla,
        }
        .run(c.backend)?;
        Ok([s.q.set(q), s.k.set(k), s.v.set(v)])
    }

    fn attended(&self, c: Context<'_>, s: &mut AttentionSaved) -> Result<Tensor> {
        if let Some(out) = s.out.load(c.backend)? {
            return Ok(out);
        }
        let [q, k, v] = self.qkv(c, s)?;
        let out = alloc(c.backend, v.dtype(), v.shape())?;
        let lse = alloc(c.backend, DType::F32, &[v.rows(), self.mla.heads])?;
        AttentionOp::Forward(AttentionForward {
            q: &q,
            k: &k,
            v: &v,
            start: Some(&c.inputs.start),
            out: &out,
            lse: &lse,
            shape: self.shape(c.tokens),
        })
        .run(c.backend)?;
        s.lse = Some(lse);
        Ok(s.out.set(out))
    }

    pub(super) fn forward(&self, c: Context<'_>, x: Tensor, policy: LayerPolicy) -> Result<(Tensor, AttentionSaved)> {
        let mut s = AttentionSaved::new(x);
        let out = self.attended(c, &mut s)?;
        let projected = forward(c.backend, c.tokens, &out, &self.output, out.dtype())?;
        let y = sum(c.backend, &s.x, &projected)?;
        for normed in [&mut s.normed, &mut s.q_normed, &mut s.kv_normed] {
            normed.settle(c.backend, policy.attention_input)?;
        }
        for saved in [&mut s.q, &mut s.k, &mut s.v] {
            saved.settle(c.backend, policy.qkv)?;
        }
        s.out.settle(c.backend, policy.attention_output)?;
        Ok((y, s))
    }

    /// The gradient of x for the gradient `dy` of the result.
    pub(super) fn backward(&self, c: Context<'_>, dy: &Tensor, mut s: AttentionSaved) -> Result<Tensor> {
        let (b, t, element) = (c.backend, c.tokens, dy.dtype());
        let [q, k, v] = self.qkv(c, &mut s)?;
        let out = self.attended(c, &mut s)?;
        let lse = s.lse.clone().expect("attended wrote it");
        wgrad(b, t, dy, &out, &self.output)?;
        let d_out = dgrad(b, t, dy, &self.output, element)?;
        let like = |x: &Tensor| alloc(b, element, x.shape());
        let (d_q, d_k, d_v) = (like(&q)?, like(&k)?, like(&v)?);
        AttentionOp::Backward(AttentionBackward {
            q: &q,
            k: &k,
            v: &v,
            start: Some(&c.inputs.start),
            out: &out,
            lse: &lse,
            d_out: &d_out,
            d_q: &d_q,
            d_k: &d_k,
            d_v: &d_v,
            shape: self.shape(t),
        })
        .run(b)?;
        let MlaShape { heads, nope, rope, v: v_dim } = self.mla;
        let rows = t.count();
        let d_q_in = like(&q)?;
        let d_kv = alloc(b, element, &[rows, heads * (nope + v_dim)])?;
        let d_k_rope = alloc(b, element, &[rows, rope])?;
        MlaGrad {
            d_q: &d_q,
            d_k: &d_k,
            d_v: &d_v,
            positions: &c.inputs.positions,
            cos: &c.rope.cos,
            sin: &c.rope.sin,
            d_q_in: &d_q_in,
            d_kv: &d_kv,
            d_k_rope: &d_k_rope,
            shape: self.mla,
        }
        .run(b)?;

        // Keys and values.
        let kv_normed = self.kv_normed(c, &mut s)?;
        wgrad(b, t, &d_kv, &kv_normed, &self.kv_b)?;
        let d_kv_normed = dgrad(b, t, &d_kv, &self.kv_b, element)?;
        let (latent, _) = self.kv_latent(c, &mut s)?;
        let d_latent = s.kv_normed.backward(b, &self.kv_norm, &latent, &d_kv_normed, None)?;
        let rank = latent.cols();
        let d_kv_a = alloc(b, element, &[rows, rank + rope])?;
        CopyColumns { x: &d_latent, x_column: 0, out: &d_kv_a, out_column: 0, width: rank }.run(b)?;
        CopyColumns { x: &d_k_rope, x_column: 0, out: &d_kv_a, out_column: rank, width: rope }.run(b)?;
        let normed = self.normed(c, &mut s)?;
        wgrad(b, t, &d_kv_a, &normed, &self.kv_a)?;
        let d_normed_kv = dgrad(b, t, &d_kv_a, &self.kv_a, element)?;

        // Queries.
        let q_input = self.q_input(c, &mut s)?;
        wgrad(b, t, &d_q_in, &q_input, &self.q_b)?;
        let d_q_input = dgrad(b, t, &d_q_in, &self.q_b, element)?;
        let d_normed_q = match (&self.q_a, &s.q_latent) {
            (Some((down, gain)), Some(latent)) => {
                let d_latent = s.q_normed.backward(b, gain, latent, &d_q_input, None)?;
                wgrad(b, t, &d_latent, &normed, down)?;
                dgrad(b, t, &d_latent, down, element)?
            }
            _ => d_q_input,
        };

        let d_normed = sum(b, &d_normed_q, &d_normed_kv)?;
        s.normed.backward(b, &self.norm, &s.x, &d_normed, Some(dy))
    }
}
