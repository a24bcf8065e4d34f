//! Multi-head latent attention (arXiv 2405.04434, section 2.1): low-rank queries, keys and values, and a rotary part that
//! all heads' keys share.
//!
//! Each activation that the backward pass needs has a function here that loads it, or computes it from the ones before
//! it and saves it. The forward pass calls the last of them; so does a backward pass under activation checkpointing.

use dropless_core::ops::{CopyColumns, Fill, Mla as MlaOp, MlaGrad, MlaShape, Pairs};
use dropless_core::{Backend, Result, Tensor};

use super::softmax::{Heads, SoftmaxSaved};
use crate::cache::{Kept, NewRows, copy_rows};
use crate::context::{Context, alloc, sum};
use crate::nn::quantized::{FORWARD, Rows, Uses, WGRAD};
use crate::nn::{Linear, Norm, Normed};
use crate::params::{Builder, Id};
use crate::rope::Rope;
use crate::weights::Weights;

/// The extents of latent attention, and its variants.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Heads.
    pub heads: usize,
    /// Rank of the query projection; None for a full-rank one.
    pub q_rank: Option<usize>,
    /// Rank of the key and value projection.
    pub kv_rank: usize,
    /// Elements of a query or key without position.
    pub nope: usize,
    /// Elements of a query or key with rotary position.
    pub rope: usize,
    /// Elements of a value.
    pub v: usize,
    /// How the elements with rotary position form pairs.
    pub pairs: Pairs,
    /// Epsilon of the norms of the latents, whatever that of the other norms is.
    pub latent_eps: f32,
}

impl Config {
    pub(super) fn parameters(&self, h: usize) -> f64 {
        let [h, heads, kv_rank] = [h, self.heads, self.kv_rank].map(|n| n as f64);
        let [nope, rope, v] = [self.nope, self.rope, self.v].map(|n| n as f64);
        let query = heads * (nope + rope);
        let query = self.q_rank.map_or(h * query, |rank| rank as f64 * (h + query));
        query + h * (kv_rank + rope) + kv_rank * heads * (nope + v) + heads * v * h
    }

    pub(super) fn check(&self) -> std::result::Result<(), String> {
        match self.rope {
            rope if rope.is_multiple_of(2) => Ok(()),
            rope => Err(format!("qk_rope_head_dim is {rope}, but rotary positions turn pairs")),
        }
    }

    pub(super) fn describe(&self, builder: &mut Builder, h: usize, layer: usize) -> Description {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let &Config { heads, q_rank, kv_rank, nope, rope, v, .. } = self;
        let norm = builder.norm(name("input_layernorm"), h);
        let (q_a, q_b) = match q_rank {
            None => (None, builder.matrix(name("self_attn.q_proj"), &[heads * (nope + rope), h])),
            Some(rank) => {
                let down = builder.matrix(name("self_attn.q_a_proj"), &[rank, h]);
                let norm = builder.norm(name("self_attn.q_a_layernorm"), rank);
                (Some((down, norm)), builder.matrix(name("self_attn.q_b_proj"), &[heads * (nope + rope), rank]))
            }
        };
        Description {
            norm,
            q_a,
            q_b,
            kv_a: builder.matrix(name("self_attn.kv_a_proj_with_mqa"), &[kv_rank + rope, h]),
            kv_norm: builder.norm(name("self_attn.kv_a_layernorm"), kv_rank),
            kv_b: builder.matrix(name("self_attn.kv_b_proj"), &[heads * (nope + v), kv_rank]),
            output: builder.matrix(name("self_attn.o_proj"), &[h, heads * v]),
        }
    }
}

/// The parameters, by their place in the arenas.
#[derive(Debug)]
pub(crate) struct Description {
    norm: Id,
    /// Down projection and norm of the queries, if they are low-rank.
    q_a: Option<(Id, Id)>,
    q_b: Id,
    kv_a: Id,
    kv_norm: Id,
    kv_b: Id,
    output: Id,
}

impl Description {
    pub(super) fn linear(&self) -> Vec<Id> {
        let down = self.q_a.map(|(down, _)| down);
        down.into_iter().chain([self.q_b, self.kv_a, self.kv_b, self.output]).collect()
    }

    pub(super) fn build(&self, config: &Config, rope: &Rope, eps: f32, weights: Weights<'_>) -> Result<Mla> {
        let &Config { heads, nope, rope: rotary, v, pairs, .. } = config;
        let scale = rope.softmax_scale(nope + rotary);
        Ok(Mla {
            norm: weights.norm(self.norm, eps)?,
            q_a: self
                .q_a
                .map(|(down, id)| Ok((weights.linear(down)?, weights.norm(id, config.latent_eps)?)))
                .transpose()?,
            q_b: weights.linear(self.q_b)?,
            kv_a: weights.linear(self.kv_a)?,
            kv_norm: weights.norm(self.kv_norm, config.latent_eps)?,
            kv_b: weights.linear(self.kv_b)?,
            output: weights.linear(self.output)?,
            shape: MlaShape { heads, nope, rope: rotary, v, pairs },
            heads: Heads { heads, kv_heads: heads, qk_dim: nope + rotary, v_dim: v, scale },
        })
    }
}

/// Latent attention with its norm and its residual.
#[derive(Debug)]
pub(crate) struct Mla {
    norm: Norm,
    q_a: Option<(Linear, Norm)>,
    q_b: Linear,
    kv_a: Linear,
    kv_norm: Norm,
    kv_b: Linear,
    output: Linear,
    shape: MlaShape,
    heads: Heads,
}

/// The latent of keys and values, and the rotary key, as projected.
#[derive(Clone, Debug)]
struct KvLatent {
    latent: Tensor,
    k_rope: Tensor,
}

/// What the backward pass needs. The low-rank latents and the per-row statistics are small and always kept.
#[derive(Debug)]
pub(crate) struct Saved {
    x: Tensor,
    normed: Normed,
    q_latent: Option<Tensor>,
    q_normed: Normed,
    kv_latent: Option<KvLatent>,
    kv_normed: Normed,
    softmax: SoftmaxSaved,
}

impl Saved {
    fn new(x: Tensor) -> Saved {
        Saved {
            x,
            normed: Normed::default(),
            q_latent: None,
            q_normed: Normed::default(),
            kv_latent: None,
            kv_normed: Normed::default(),
            softmax: SoftmaxSaved::default(),
        }
    }

    pub(super) fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        self.softmax.prefetch(backend)?;
        [&mut self.kv_normed, &mut self.q_normed, &mut self.normed].into_iter().try_for_each(|n| n.prefetch(backend))
    }
}

impl Mla {
    fn normed(&self, c: Context<'_>, s: &mut Saved) -> Result<Tensor> {
        s.normed.get(c.backend, &self.norm, &s.x)
    }

    pub(super) fn prepare(&mut self, backend: &dyn Backend) -> Result<()> {
        let down = self.q_a.as_mut().map(|(down, _)| down);
        let others = [&mut self.q_b, &mut self.kv_a, &mut self.kv_b, &mut self.output];
        down.into_iter().chain(others).try_for_each(|linear| linear.prepare(backend))
    }

    /// Rows as operands of the projections, which have one recipe.
    fn rows<'a>(&self, c: Context<'_>, x: &'a Tensor, uses: Uses) -> Result<Rows<'a>> {
        self.output.recipe.rows(c.backend, c.tokens, x, uses)
    }

    fn project(&self, c: Context<'_>, x: &Tensor, linear: &Linear) -> Result<Tensor> {
        linear.forward(c.backend, c.tokens, &self.rows(c, x, FORWARD)?)
    }

    /// The projections of the normalised input, which is quantized once for both: queries (their latent, if they are
    /// low-rank), and the latent of keys and values with the rotary key. The latents are kept.
    fn project_input(&self, c: Context<'_>, s: &mut Saved) -> Result<(Tensor, KvLatent)> {
        if let (Some(q), Some(kv)) = (&s.q_latent, &s.kv_latent) {
            return Ok((q.clone(), kv.clone()));
        }
        let normed = self.normed(c, s)?;
        let x = self.rows(c, &normed, FORWARD)?;
        let q = self.q_a.as_ref().map_or(&self.q_b, |(down, _)| down).forward(c.backend, c.tokens, &x)?;
        if self.q_a.is_some() {
            s.q_latent = Some(q.clone());
        }
        let kv = match &s.kv_latent {
            Some(kv) => kv.clone(),
            None => self.kv_latent(c, &x)?,
        };
        s.kv_latent = Some(kv.clone());
        Ok((q, kv))
    }

    fn kv_latent(&self, c: Context<'_>, x: &Rows<'_>) -> Result<KvLatent> {
        let both = self.kv_a.forward(c.backend, c.tokens, x)?;
        let (t, rope) = (both.rows(), self.shape.rope);
        let rank = both.cols() - rope;
        let latent = alloc(c.backend, both.dtype(), &[t, rank])?;
        let k_rope = alloc(c.backend, both.dtype(), &[t, rope])?;
        CopyColumns { x: &both, x_column: 0, out: &latent, out_column: 0, width: rank }.run(c.backend)?;
        CopyColumns { x: &both, x_column: rank, out: &k_rope, out_column: 0, width: rope }.run(c.backend)?;
        Ok(KvLatent { latent, k_rope })
    }

    /// Queries before their rotation, normalised latents of keys and values, and rotary keys before their rotation.
    fn projected(&self, c: Context<'_>, s: &mut Saved) -> Result<[Tensor; 3]> {
        let (q, KvLatent { latent, k_rope }) = self.project_input(c, s)?;
        let q_in = match &self.q_a {
            None => q,
            Some((_, norm)) => self.project(c, &s.q_normed.get(c.backend, norm, &q)?, &self.q_b)?,
        };
        Ok([q_in, s.kv_normed.get(c.backend, &self.kv_norm, &latent)?, k_rope])
    }

    fn qkv(&self, c: Context<'_>, s: &mut Saved) -> Result<[Tensor; 3]> {
        if let Some(qkv) = s.softmax.qkv(c.backend)? {
            return Ok(qkv);
        }
        let [q_in, kv_normed, k_rope] = self.projected(c, s)?;
        let qkv = self.assemble(c, &q_in, &kv_normed, &k_rope, &c.inputs.positions)?;
        Ok(s.softmax.set_qkv(qkv))
    }

    /// Queries, keys and values of projected queries, normalised latents and rotary keys, `c.tokens` rows of each.
    fn assemble(
        &self,
        c: Context<'_>,
        q_in: &Tensor,
        kv_normed: &Tensor,
        k_rope: &Tensor,
        positions: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let kv = self.project(c, kv_normed, &self.kv_b)?;
        let q = alloc(c.backend, q_in.dtype(), q_in.shape())?;
        let k = alloc(c.backend, q_in.dtype(), q_in.shape())?;
        let v = alloc(c.backend, q_in.dtype(), &[q_in.rows(), self.shape.heads * self.shape.v])?;
        MlaOp {
            q_in,
            kv: &kv,
            k_rope,
            positions,
            cos: &c.rope.cos,
            sin: &c.rope.sin,
            q: &q,
            k: &k,
            v: &v,
            shape: self.shape,
        }
        .run(c.backend)?;
        Ok([q, k, v])
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
        let projected = self.project(c, &out, &self.output)?;
        let y = sum(c.backend, &s.x, &projected)?;
        for normed in [&mut s.normed, &mut s.q_normed, &mut s.kv_normed] {
            normed.settle(c.backend, c.policy.attention_input)?;
        }
        s.softmax.settle(c)?;
        Ok((y, s))
    }

    pub(super) fn cached_widths(&self) -> [usize; 2] {
        [self.kv_b.k(), self.shape.rope]
    }

    /// Keys and values are made anew from the latents that are kept, which are far smaller.
    pub(super) fn decode(&self, c: Context<'_>, x: &Tensor, rows: &[NewRows], kept: &[Kept]) -> Result<Tensor> {
        let mut s = Saved::new(x.clone());
        let [q_in, kv_normed, k_rope] = self.projected(c, &mut s)?;
        let out = alloc(c.backend, x.dtype(), &[q_in.rows(), self.shape.heads * self.shape.v])?;
        for (rows, [latents, rotary]) in rows.iter().zip(kept).filter(|(rows, _)| rows.count > 0) {
            let latents = rows.keep(c.backend, &kv_normed, latents)?;
            let rotary = rows.keep(c.backend, &k_rope, rotary)?;
            let length = rows.length();
            // The op turns a query for each key; those of earlier rows are of no use.
            let all = alloc(c.backend, q_in.dtype(), &[length, q_in.cols()])?;
            Fill { out: &all, value: 0.0 }.run(c.backend)?;
            copy_rows(c.backend, &rows.of(&q_in)?, &all.slice(rows.before, length)?)?;
            let whole = Context { tokens: &rows.whole, ..c };
            let [q, k, v] = self.assemble(whole, &all, &latents, &rotary, &rows.positions)?;
            let attended = self.heads.last_rows(c.backend, &q.slice(rows.before, length)?, &k, &v)?;
            copy_rows(c.backend, &attended, &rows.of(&out)?)?;
        }
        let projected = self.project(c, &out, &self.output)?;
        sum(c.backend, x, &projected)
    }

    pub(super) fn backward(&self, c: Context<'_>, dy: &Tensor, mut s: Saved) -> Result<Tensor> {
        let (b, t, element) = (c.backend, c.tokens, dy.dtype());
        let qkv = self.qkv(c, &mut s)?;
        let out = self.attended(c, &mut s)?;
        let d_out = self.output.backward(b, t, dy, &self.rows(c, &out, WGRAD)?)?;
        let [d_q, d_k, d_v] = s.softmax.backward(c, self.heads, &qkv, &out, &d_out)?;
        let MlaShape { heads, nope, rope, v: v_dim, .. } = self.shape;
        let rows = t.count();
        let d_q_in = alloc(b, element, d_q.shape())?;
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
            shape: self.shape,
        }
        .run(b)?;

        // Keys and values.
        let KvLatent { latent, .. } = s.kv_latent.clone().expect("a backward pass follows a forward pass");
        let kv_normed = s.kv_normed.get(b, &self.kv_norm, &latent)?;
        let d_kv_normed = self.kv_b.backward(b, t, &d_kv, &self.rows(c, &kv_normed, WGRAD)?)?;
        let d_latent = s.kv_normed.backward(b, &self.kv_norm, &latent, &d_kv_normed, None)?;
        let rank = latent.cols();
        let d_kv_a = alloc(b, element, &[rows, rank + rope])?;
        CopyColumns { x: &d_latent, x_column: 0, out: &d_kv_a, out_column: 0, width: rank }.run(b)?;
        CopyColumns { x: &d_k_rope, x_column: 0, out: &d_kv_a, out_column: rank, width: rope }.run(b)?;
        let normed = self.normed(c, &mut s)?;
        let x = self.rows(c, &normed, WGRAD)?;
        let d_normed_kv = self.kv_a.backward(b, t, &d_kv_a, &x)?;

        // Queries.
        let d_normed_q = match (&self.q_a, &s.q_latent) {
            (Some((down, norm)), Some(latent)) => {
                let q_normed = s.q_normed.get(b, norm, latent)?;
                let d_q_normed = self.q_b.backward(b, t, &d_q_in, &self.rows(c, &q_normed, WGRAD)?)?;
                let d_latent = s.q_normed.backward(b, norm, latent, &d_q_normed, None)?;
                down.backward(b, t, &d_latent, &x)?
            }
            _ => self.q_b.backward(b, t, &d_q_in, &x)?,
        };

        let d_normed = sum(b, &d_normed_q, &d_normed_kv)?;
        s.normed.backward(b, &self.norm, &s.x, &d_normed, Some(dy))
    }
}
