//! The DeepSeek-V3 architecture (arXiv 2412.19437) over any backend, forward and backward.
//!
//! `params` lays the parameters out in arenas and knows their Hugging Face names, `rope` makes the rotary tables,
//! `attention` is multi-head latent attention, `layer` a transformer layer, `head` the losses. This file puts them
//! together. One [`Model`] is one rank's share: replicated weights in full, and the experts that live there.

mod attention;
mod head;
mod layer;
mod params;
mod rope;

pub(crate) use params::{Arena, ROW};
pub use params::{GradientSums, Initial, Moments, Params, Piece};

use dropless_core::nn::{Policy, Tokens, Weight};
use dropless_core::ops::{Add, CopyColumns, EmbeddingGrad, Fill, GatherRows, Score};
use dropless_core::{Backend, DType, Memory, Tensor};

use crate::config::{self, Config, ModelConfig, ScoringFunc, single};
use crate::error::Result;

use head::{Head, HeadLoss};
use layer::{Feed, Layer, LayerSaved};
use params::Builder;

/// The tokens of one micro-step on one rank, on the device.
#[derive(Debug)]
pub struct Inputs {
    /// Token ids, u32 `[tokens]`.
    pub ids: Tensor,
    /// Next tokens, u32 `[tokens]`; [`dropless_core::ops::NONE`] for no target.
    pub targets: Tensor,
    /// Position of each token in its document, u32 `[tokens]`.
    pub positions: Tensor,
    /// First key that each token sees, u32 `[tokens]`.
    pub start: Tensor,
    /// 1 / (tokens with a target in the whole step), f32 `[1]`.
    pub scale: Tensor,
    /// What the multi-token-prediction module needs, if there is one.
    pub next: Option<NextInputs>,
}

/// Inputs of the multi-token-prediction module.
#[derive(Debug)]
pub struct NextInputs {
    /// The next token (0 where there is none), u32 `[tokens]`.
    pub ids: Tensor,
    /// The one after it, or [`dropless_core::ops::NONE`].
    pub targets: Tensor,
    /// The loss coefficient / (tokens with such a target in the whole step), f32 `[1]`.
    pub scale: Tensor,
}

/// The losses of a micro-step on one rank, still on the device.
#[derive(Debug)]
pub struct Losses {
    /// Cross-entropy of each token, f32 `[tokens]`.
    pub tokens: Tensor,
    /// The same of the multi-token-prediction module.
    pub next: Option<Tensor>,
    /// The auxiliary loss of each sequence, one tensor for each MoE layer.
    pub balance: Vec<Tensor>,
}

/// One rank's share of a model.
#[derive(Debug)]
pub struct Model {
    /// Parameters, gradients and optimizer state.
    pub params: Params,
    element: DType,
    embedding: Weight,
    layers: Vec<Layer>,
    head: Head,
    next: Option<NextToken>,
    rope: rope::Tables,
    policy: layer::LayerPolicy,
}

/// The multi-token-prediction module: `layer(project([norm(embedding of the next token), norm(h)]))`, then the head.
#[derive(Debug)]
struct NextToken {
    embedding_norm: attention::Gain,
    hidden_norm: attention::Gain,
    project: Weight,
    layer: Layer,
    head: Head,
}

/// What a forward pass leaves for the backward pass.
#[derive(Debug)]
struct Saved {
    layers: Vec<LayerSaved>,
    hidden: Tensor,
}

/// A device tensor of undefined contents.
fn alloc(backend: &dyn Backend, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    Ok(backend.alloc(dtype, shape, Memory::Device)?)
}

impl Model {
    /// A model with undefined weights; [`crate::train::state`] fills them.
    ///
    /// # Errors
    /// [`dropless_core::Error::Capacity`] when the memory is not there, also for the worst case of the experts.
    pub fn new(backend: &dyn Backend, config: &Config, tokens: &Tokens) -> Result<Model> {
        let model = &config.model;
        let recipe = recipe(config.train.recipe);
        let element = recipe.element();
        let mut builder = Builder::new(backend, element, tokens);
        let embedding = builder.matrix("model.embed_tokens.weight", &[model.vocab_size, model.hidden_size]);
        let mut layers = Vec::new();
        for index in 0..model.num_hidden_layers {
            layers.push(layer::describe(&mut builder, config, index));
        }
        let norm = builder.gain("model.norm.weight", model.hidden_size);
        let output = builder.matrix("lm_head.weight", &[model.vocab_size, model.hidden_size]);
        let next = (model.num_nextn_predict_layers > 0).then(|| {
            let index = model.num_hidden_layers;
            let (h, name) = (model.hidden_size, |part: &str| format!("model.layers.{index}.{part}.weight"));
            (
                builder.gain(&name("enorm"), h),
                builder.gain(&name("hnorm"), h),
                builder.matrix(&name("eh_proj"), &[h, 2 * h]),
                layer::describe(&mut builder, config, index),
                builder.gain(&name("shared_head.norm"), h),
            )
        });
        let params = builder.build()?;
        let eps = eps(model);
        let head = |norm| Head::new(attention::Gain::new(&params, norm, eps), params.weight(output));
        let layers = layers.into_iter().map(|l| Layer::new(backend, config, &params, l)).collect::<Result<Vec<_>>>()?;
        let next = match next {
            None => None,
            Some((embedding_norm, hidden_norm, project, layer, norm)) => Some(NextToken {
                embedding_norm: attention::Gain::new(&params, embedding_norm, eps),
                hidden_norm: attention::Gain::new(&params, hidden_norm, eps),
                project: params.weight(project),
                layer: Layer::new(backend, config, &params, layer)?,
                head: head(norm),
            }),
        };
        let model = Model {
            element,
            embedding: params.weight(embedding),
            head: head(norm),
            layers,
            next,
            rope: rope::Tables::new(backend, model, tokens.sequence())?,
            policy: layer::LayerPolicy::new(&config.activations),
            params,
        };
        let budget = match config.moe.memory_budget_mb {
            0 => u64::MAX,
            mb => mb.saturating_mul(1 << 20),
        };
        for layer in model.all_layers() {
            if let Feed::Moe(moe) = &layer.feed {
                moe.layer.check_budget(backend, tokens, budget)?;
            }
        }
        Ok(model)
    }

    fn all_layers(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter().chain(self.next.iter().map(|n| &n.layer))
    }

    /// Selection bias and expert counts of each MoE layer, in order.
    pub fn balancing(&self) -> impl Iterator<Item = &layer::Balancing> {
        self.all_layers().filter_map(|l| match &l.feed {
            Feed::Moe(moe) => Some(&moe.balancing),
            Feed::Dense(_) => None,
        })
    }

    /// Brings the weights into the form of the products, after they changed.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn prepare(&mut self, backend: &dyn Backend) -> Result<()> {
        self.layers.iter_mut().chain(self.next.iter_mut().map(|n| &mut n.layer)).try_for_each(|l| l.prepare(backend))
    }

    fn embed(&self, backend: &dyn Backend, ids: &Tensor) -> Result<Tensor> {
        let table = self.embedding.value.index(0)?;
        let out = alloc(backend, self.element, &[ids.len(), table.cols()])?;
        GatherRows { x: &table, index: ids, out: &out }.run(backend)?;
        Ok(out)
    }

    fn hidden(&self, backend: &dyn Backend, tokens: &Tokens, inputs: &Inputs, counted: bool) -> Result<Saved> {
        let mut hidden = self.embed(backend, &inputs.ids)?;
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let (next, saved) = layer.forward(backend, tokens, inputs, &self.rope, hidden, self.policy, counted)?;
            hidden = next;
            layers.push(saved);
        }
        Ok(Saved { layers, hidden })
    }

    /// Logits, f32 `[tokens, vocabulary]`.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn logits(&self, backend: &dyn Backend, tokens: &Tokens, inputs: &Inputs) -> Result<Tensor> {
        let saved = self.hidden(backend, tokens, inputs, false)?;
        self.head.logits(backend, tokens, &saved.hidden)
    }

    /// The loss of each token, f32 `[tokens]`; gradients and expert counts stay as they are.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn evaluate(&self, backend: &dyn Backend, tokens: &Tokens, inputs: &Inputs) -> Result<Tensor> {
        let saved = self.hidden(backend, tokens, inputs, false)?;
        self.head.evaluate(backend, tokens, &saved.hidden, &inputs.targets, &inputs.scale)
    }

    /// Forward and backward: adds to the gradients and to the expert counts.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn step(&self, backend: &dyn Backend, tokens: &Tokens, inputs: &Inputs) -> Result<Losses> {
        let saved = self.hidden(backend, tokens, inputs, true)?;
        let mut balance: Vec<Tensor> = saved.layers.iter().filter_map(|s| s.balance_loss().cloned()).collect();
        let (mut residual, mut next_loss) = (None, None);
        if let (Some(next), Some(more)) = (&self.next, &inputs.next) {
            let (d_hidden, loss, aux) = self.next_token(backend, tokens, inputs, next, more, &saved.hidden)?;
            residual = Some(d_hidden);
            next_loss = Some(loss);
            balance.extend(aux);
        }
        let HeadLoss { loss, d_hidden } =
            self.head.step(backend, tokens, &saved.hidden, &inputs.targets, &inputs.scale, residual.as_ref())?;
        let (mut d_hidden, mut layers) = (d_hidden, saved.layers);
        for layer in self.layers.iter().rev() {
            let saved = layers.pop().expect("one for each layer");
            // What the layer before needs travels while this one computes.
            if let Some(before) = layers.last_mut() {
                before.prefetch(backend)?;
            }
            d_hidden = layer.backward(backend, tokens, inputs, &self.rope, d_hidden, saved)?;
        }
        let d_table = &self.embedding.grad;
        EmbeddingGrad { dy: &d_hidden, ids: &inputs.ids, d_table }.run(backend)?;
        Ok(Losses { tokens: loss, next: next_loss, balance })
    }

    /// The multi-token-prediction module, forward and backward: the gradient of `hidden`, the loss of each token and the
    /// auxiliary loss of its layer.
    fn next_token(
        &self,
        backend: &dyn Backend,
        tokens: &Tokens,
        inputs: &Inputs,
        next: &NextToken,
        more: &NextInputs,
        hidden: &Tensor,
    ) -> Result<(Tensor, Tensor, Option<Tensor>)> {
        use dropless_core::nn::{dgrad, forward, wgrad};
        let (t, h) = (hidden.rows(), hidden.cols());
        let embedded = self.embed(backend, &more.ids)?;
        let (e, e_rstd) = next.embedding_norm.forward(backend, &embedded)?;
        let (n, n_rstd) = next.hidden_norm.forward(backend, hidden)?;
        let both = alloc(backend, self.element, &[t, 2 * h])?;
        CopyColumns { x: &e, x_column: 0, out: &both, out_column: 0, width: h }.run(backend)?;
        CopyColumns { x: &n, x_column: 0, out: &both, out_column: h, width: h }.run(backend)?;
        let x = forward(backend, tokens, &both, &next.project, self.element)?;
        let (y, saved) = next.layer.forward(backend, tokens, inputs, &self.rope, x, self.policy, true)?;
        let aux = saved.balance_loss().cloned();

        let HeadLoss { loss, d_hidden } = next.head.step(backend, tokens, &y, &more.targets, &more.scale, None)?;
        let dx = next.layer.backward(backend, tokens, inputs, &self.rope, d_hidden, saved)?;
        wgrad(backend, tokens, &dx, &both, &next.project)?;
        let d_both = dgrad(backend, tokens, &dx, &next.project, self.element)?;
        let (de, dn) = (alloc(backend, self.element, &[t, h])?, alloc(backend, self.element, &[t, h])?);
        CopyColumns { x: &d_both, x_column: 0, out: &de, out_column: 0, width: h }.run(backend)?;
        CopyColumns { x: &d_both, x_column: h, out: &dn, out_column: 0, width: h }.run(backend)?;
        let d_embedded = next.embedding_norm.backward(backend, &embedded, &e_rstd, &de, None)?;
        EmbeddingGrad { dy: &d_embedded, ids: &more.ids, d_table: &self.embedding.grad }.run(backend)?;
        let d_hidden = next.hidden_norm.backward(backend, hidden, &n_rstd, &dn, None)?;
        Ok((d_hidden, loss, aux))
    }

    /// Sets every gradient and every expert count to zero.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn clear_gradients(&self, backend: &dyn Backend) -> Result<()> {
        self.params.clear_gradients(backend)?;
        for balancing in self.balancing() {
            Fill { out: &balancing.counts, value: 0.0 }.run(backend)?;
        }
        Ok(())
    }
}

fn eps(model: &ModelConfig) -> f32 {
    single(model.rms_norm_eps)
}

fn recipe(recipe: config::Recipe) -> dropless_core::moe::Recipe {
    use dropless_core::moe::Recipe;
    match recipe {
        config::Recipe::F32 => Recipe::F32,
        config::Recipe::Bf16 => Recipe::Bf16,
        config::Recipe::Mxfp8 => Recipe::Mxfp8,
        config::Recipe::Fp8Block => Recipe::Fp8Block,
    }
}

fn policy(policy: config::Policy) -> Policy {
    match policy {
        config::Policy::Keep => Policy::Keep,
        config::Policy::Offload => Policy::Offload,
        config::Policy::Recompute => Policy::Recompute,
    }
}

fn score(score: ScoringFunc) -> Score {
    match score {
        ScoringFunc::Sigmoid => Score::Sigmoid,
        ScoringFunc::Softmax => Score::Softmax,
    }
}

/// `a + b` in a new tensor like a.
fn sum(backend: &dyn Backend, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = alloc(backend, a.dtype(), a.shape())?;
    Add { a, b, c: None, out: &out }.run(backend)?;
    Ok(out)
}
