//! A transformer layer: attention, then a dense MLP or a Mixture-of-Experts layer, each with norm and residual.

use dropless_core::moe::{Moe, MoeExperts, MoePolicy, MoeSaved, Router};
use dropless_core::nn::{Mlp, MlpPolicy, MlpSaved, Policy, Tokens};
use dropless_core::{Backend, DType, Tensor};

use super::attention::{self, Attention, AttentionSaved, Context, Gain, Normed};
use super::params::{Builder, Id, Params};
use super::rope::Tables;
use super::{Inputs, alloc, eps, policy, recipe, score, sum};
use crate::config::{Activations, Config, single};
use crate::error::Result;

/// What becomes of a layer's activations.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerPolicy {
    pub(super) attention_input: Policy,
    pub(super) qkv: Policy,
    pub(super) attention_output: Policy,
    mlp_input: Policy,
    moe: MoePolicy,
}

impl LayerPolicy {
    pub(super) fn new(a: &Activations) -> LayerPolicy {
        let mlp = MlpPolicy { gate_up: policy(a.gate_up), hidden: policy(a.expert_hidden) };
        LayerPolicy {
            attention_input: policy(a.attention_input),
            qkv: policy(a.qkv),
            attention_output: policy(a.attention_output),
            mlp_input: policy(a.mlp_input),
            moe: MoePolicy { dispatched: policy(a.dispatched), experts: mlp, shared: mlp },
        }
    }
}

/// The parameters of a layer, by their place in the arenas.
pub(super) struct Description {
    attention: attention::Description,
    norm: Id,
    feed: FeedDescription,
}

enum FeedDescription {
    Dense { gate_up: Id, down: Id },
    Moe { router: Id, bias: Id, gate_up: Id, down: Id, shared: Option<(Id, Id)> },
}

pub(super) fn describe(builder: &mut Builder<'_>, config: &Config, layer: usize) -> Description {
    let model = &config.model;
    let (h, i, e) = (model.hidden_size, model.moe_intermediate_size, model.n_routed_experts);
    let attention = attention::describe(builder, model, layer);
    let prefix = format!("model.layers.{layer}");
    let norm = builder.gain(&format!("{prefix}.post_attention_layernorm.weight"), h);
    let mlp = format!("{prefix}.mlp");
    let feed = if layer < model.first_k_dense_replace {
        let (gate_up, down) = builder.mlp(&mlp, h, model.intermediate_size);
        FeedDescription::Dense { gate_up, down }
    } else {
        let router = builder.router(&format!("{mlp}.gate.weight"), e, h);
        let bias = builder.bias(&format!("{mlp}.gate.e_score_correction_bias"), e);
        let (gate_up, down) = builder.experts(&format!("{mlp}.experts"), e, h, i);
        let shared = (model.n_shared_experts > 0)
            .then(|| builder.mlp(&format!("{mlp}.shared_experts"), h, model.n_shared_experts * i));
        FeedDescription::Moe { router, bias, gate_up, down, shared }
    };
    Description { attention, norm, feed }
}

/// The second half of a layer.
#[derive(Debug)]
pub(super) enum Feed {
    Dense(Box<Mlp>),
    Moe(Box<Experts>),
}

/// A MoE layer with what changes between steps.
#[derive(Debug)]
pub(super) struct Experts {
    pub(super) layer: Moe,
    pub(super) balancing: Balancing,
    /// Counts of passes that must not count (evaluation).
    uncounted: Tensor,
    prepared: Option<MoeExperts>,
}

/// The state of aux-loss-free balancing.
#[derive(Debug)]
pub struct Balancing {
    /// Selection bias, f32 `[experts]`.
    pub bias: Tensor,
    /// Choices of each expert on this rank since the last update, u32 `[experts]`.
    pub counts: Tensor,
}

/// A transformer layer.
#[derive(Debug)]
pub(super) struct Layer {
    attention: Attention,
    norm: Gain,
    pub(super) feed: Feed,
}

/// What the backward pass needs.
#[derive(Debug)]
pub(super) struct LayerSaved {
    attention: AttentionSaved,
    middle: Tensor,
    normed: Normed,
    feed: FeedSaved,
}

#[derive(Debug)]
enum FeedSaved {
    Dense(Box<MlpSaved>),
    Moe(Box<MoeSaved>),
}

impl LayerSaved {
    pub(super) fn balance_loss(&self) -> Option<&Tensor> {
        match &self.feed {
            FeedSaved::Moe(saved) => saved.balance_loss(),
            FeedSaved::Dense(_) => None,
        }
    }

    /// Begins to bring back what is offloaded, in the order in which the backward pass takes it.
    pub(super) fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        self.normed.prefetch(backend)?;
        match &mut self.feed {
            FeedSaved::Dense(saved) => saved.prefetch(backend)?,
            FeedSaved::Moe(saved) => saved.prefetch(backend)?,
        }
        self.attention.prefetch(backend)
    }
}

impl Layer {
    pub(super) fn new(backend: &dyn Backend, config: &Config, params: &Params, d: Description) -> Result<Layer> {
        let model = &config.model;
        let mlp = |gate_up, down| Mlp { gate_up: params.weight(gate_up), down: params.weight(down) };
        let feed = match d.feed {
            FeedDescription::Dense { gate_up, down } => Feed::Dense(Box::new(mlp(gate_up, down))),
            FeedDescription::Moe { router, bias, gate_up, down, shared } => {
                let counts = || alloc(backend, DType::U32, &[model.n_routed_experts]);
                let bias = params.value(bias);
                let layer = Moe {
                    router: Router {
                        weight: params.weight(router),
                        bias: Some(bias.clone()),
                        score: score(model.scoring_func),
                        top_k: model.num_experts_per_tok,
                        groups: model.n_group,
                        top_groups: model.topk_group,
                        normalize: model.norm_topk_prob,
                        scale: single(model.routed_scaling_factor),
                        balance: single(config.train.aux_loss_coefficient / config.train.batch_size as f64),
                    },
                    gate_up: params.weight(gate_up),
                    down: params.weight(down),
                    recipe: recipe(config.train.recipe),
                    shared: shared.map(|(gate_up, down)| mlp(gate_up, down)),
                    chunks: config.moe.chunks,
                };
                let balancing = Balancing { bias, counts: counts()? };
                let uncounted = counts()?;
                dropless_core::ops::Fill { out: &uncounted, value: 0.0 }.run(backend)?;
                Feed::Moe(Box::new(Experts { layer, balancing, uncounted, prepared: None }))
            }
        };
        Ok(Layer {
            attention: Attention::new(model, params, &d.attention),
            norm: Gain::new(params, d.norm, eps(model)),
            feed,
        })
    }

    pub(super) fn prepare(&mut self, backend: &dyn Backend) -> Result<()> {
        if let Feed::Moe(moe) = &mut self.feed {
            moe.prepared = Some(moe.layer.prepare(backend)?);
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "a layer has that many inputs; a struct would only rename them")]
    pub(super) fn forward(
        &self,
        backend: &dyn Backend,
        tokens: &Tokens,
        inputs: &Inputs,
        rope: &Tables,
        x: Tensor,
        policy: LayerPolicy,
        counted: bool,
    ) -> Result<(Tensor, LayerSaved)> {
        let (middle, attention) = self.attention.forward(Context { backend, tokens, inputs, rope }, x, policy)?;
        let mut normed = Normed::default();
        let n = normed.get(backend, &self.norm, &middle)?;
        let (y, feed) = match &self.feed {
            Feed::Dense(mlp) => {
                let mut saved = MlpSaved::default();
                let y = mlp.forward(backend, tokens, &n, policy.moe.shared, &mut saved)?;
                (sum(backend, &y, &middle)?, FeedSaved::Dense(Box::new(saved)))
            }
            Feed::Moe(moe) => {
                let mut saved = MoeSaved::default();
                let counts = if counted { &moe.balancing.counts } else { &moe.uncounted };
                let experts = moe.prepared();
                let y =
                    moe.layer.forward(backend, tokens, experts, &n, None, &middle, counts, policy.moe, &mut saved)?;
                (y, FeedSaved::Moe(Box::new(saved)))
            }
        };
        normed.settle(backend, policy.mlp_input)?;
        Ok((y, LayerSaved { attention, middle, normed, feed }))
    }

    /// The gradient of the layer's input.
    pub(super) fn backward(
        &self,
        backend: &dyn Backend,
        tokens: &Tokens,
        inputs: &Inputs,
        rope: &Tables,
        dy: Tensor,
        mut saved: LayerSaved,
    ) -> Result<Tensor> {
        let n = saved.normed.get(backend, &self.norm, &saved.middle)?;
        let d_normed = match (&self.feed, saved.feed) {
            (Feed::Dense(mlp), FeedSaved::Dense(s)) => mlp.backward(backend, tokens, &n, &dy, *s)?,
            (Feed::Moe(moe), FeedSaved::Moe(s)) => moe.layer.backward(backend, tokens, moe.prepared(), &n, &dy, *s)?,
            _ => unreachable!("a layer's saved activations are of its own kind"),
        };
        let d_middle = saved.normed.backward(backend, &self.norm, &saved.middle, &d_normed, Some(&dy))?;
        self.attention.backward(Context { backend, tokens, inputs, rope }, &d_middle, saved.attention)
    }
}

impl Experts {
    fn prepared(&self) -> &MoeExperts {
        self.prepared.as_ref().expect("Model::prepare follows every change of the weights")
    }
}
