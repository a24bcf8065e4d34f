//! A transformer layer: attention, then a dense MLP or a Mixture-of-Experts layer, each with norm and residual.

use dropless_core::ops::Fill;
use dropless_core::{Backend, DType, Result, Tensor};

use crate::architecture::{Architecture, Feed as FeedConfig, MoeConfig};
use crate::attention::{self, Attention, AttentionSaved};
use crate::cache::{Kept, NewRows};
use crate::context::{Context, alloc, sum};
use crate::moe::{Moe, MoeExperts, MoeSaved, Router};
use crate::nn::{Mlp, MlpSaved, Norm, Normed, Weight};
use crate::options::Options;
use crate::params::{Builder, Id};
use crate::single;
use crate::weights::Weights;

/// The parameters of a layer, by their place in the arenas.
#[derive(Debug)]
pub(crate) struct Description {
    attention: attention::Description,
    norm: Id,
    feed: FeedDescription,
}

#[derive(Debug)]
enum FeedDescription {
    Dense { gate_up: Id, down: Id },
    Moe { router: Id, bias: Option<Id>, gate_up: Id, down: Id, shared: Option<(Id, Id)> },
}

pub(crate) fn describe(builder: &mut Builder, model: &Architecture, feed: &FeedConfig, layer: usize) -> Description {
    let (h, names) = (model.hidden, &model.names);
    let attention = model.attention.describe(builder, h, layer);
    let prefix = format!("model.layers.{layer}");
    let norm = builder.norm(format!("{prefix}.post_attention_layernorm.weight"), h);
    let feed = match feed {
        FeedConfig::Dense { width } => {
            let (gate_up, down) = builder.mlp(&names.mlp, &format!("{prefix}.mlp"), h, *width);
            FeedDescription::Dense { gate_up, down }
        }
        FeedConfig::Moe(moe) => {
            let (e, i) = (moe.experts, moe.width);
            let prefix = format!("{prefix}.{}", names.moe);
            let router = builder.router(format!("{prefix}.gate.weight"), e, h);
            let bias = moe.selection_bias.then(|| builder.bias(format!("{prefix}.gate.e_score_correction_bias"), e));
            let (gate_up, down) = builder.experts(names, &format!("{prefix}.experts"), e, h, i);
            let shared =
                moe.shared_width.map(|width| builder.mlp(&names.mlp, &format!("{prefix}.shared_experts"), h, width));
            FeedDescription::Moe { router, bias, gate_up, down, shared }
        }
    };
    Description { attention, norm, feed }
}

/// The second half of a layer.
#[derive(Debug)]
pub(crate) enum Feed {
    Dense(Box<Mlp>),
    Moe(Box<Experts>),
}

impl Feed {
    /// The half's name in a trace.
    fn name(&self) -> &'static str {
        match self {
            Feed::Dense(_) => "mlp",
            Feed::Moe(_) => "experts",
        }
    }
}

/// A MoE layer with what changes between steps.
#[derive(Debug)]
pub(crate) struct Experts {
    pub(crate) layer: Moe,
    pub(crate) balancing: Balancing,
    /// Counts of passes that must not count (evaluation).
    uncounted: Tensor,
    prepared: Option<MoeExperts>,
}

/// The state of aux-loss-free balancing.
#[derive(Debug)]
pub struct Balancing {
    /// Selection bias, f32 `[experts]`; None in families without one.
    pub bias: Option<Tensor>,
    /// Choices of each expert on this rank since the last update, u32 `[experts]`.
    pub counts: Tensor,
}

/// A transformer layer.
#[derive(Debug)]
pub(crate) struct Layer {
    attention: Attention,
    norm: Norm,
    pub(crate) feed: Feed,
}

/// What the backward pass needs.
#[derive(Debug)]
pub(crate) struct LayerSaved {
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
    pub(crate) fn balance_loss(&self) -> Option<&Tensor> {
        match &self.feed {
            FeedSaved::Moe(saved) => saved.balance_loss(),
            FeedSaved::Dense(_) => None,
        }
    }

    /// Begins to bring back what is offloaded, in the order in which the backward pass takes it.
    pub(crate) fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        self.normed.prefetch(backend)?;
        match &mut self.feed {
            FeedSaved::Dense(saved) => saved.prefetch(backend)?,
            FeedSaved::Moe(saved) => saved.prefetch(backend)?,
        }
        self.attention.prefetch(backend)
    }
}

impl Description {
    /// The layers whose weights [`Weights::linear`] takes.
    pub(crate) fn linear(&self) -> Vec<Id> {
        let mlp = match self.feed {
            FeedDescription::Dense { gate_up, down } => Some((gate_up, down)),
            FeedDescription::Moe { shared, .. } => shared,
        };
        self.attention.linear().into_iter().chain(mlp.into_iter().flat_map(|(gate_up, down)| [gate_up, down])).collect()
    }

    pub(crate) fn build(
        &self,
        backend: &dyn Backend,
        model: &Architecture,
        feed: &FeedConfig,
        options: &Options,
        weights: Weights<'_>,
    ) -> Result<Layer> {
        let mlp = |(gate_up, down)| Ok(Mlp { gate_up: weights.linear(gate_up)?, down: weights.linear(down)? });
        let feed = match (&self.feed, feed) {
            (&FeedDescription::Dense { gate_up, down }, _) => Feed::Dense(Box::new(mlp((gate_up, down))?)),
            (FeedDescription::Moe { router, bias, gate_up, down, shared }, FeedConfig::Moe(moe)) => {
                let counts = || alloc(backend, DType::U32, &[moe.experts]);
                let bias = bias.map(|id| weights.selection_bias(id)).transpose()?;
                let layer = Moe {
                    router: moe.router(weights.get(*router)?, bias.clone(), options.balance_coefficient),
                    gate_up: weights.get(*gate_up)?,
                    down: weights.get(*down)?,
                    recipe: options.recipe,
                    shared: shared.map(mlp).transpose()?,
                    chunks: options.chunks,
                };
                let (balancing, uncounted) = (Balancing { bias, counts: counts()? }, counts()?);
                Fill { out: &uncounted, value: 0.0 }.run(backend)?;
                Feed::Moe(Box::new(Experts { layer, balancing, uncounted, prepared: None }))
            }
            _ => unreachable!("a layer is built from its own configuration"),
        };
        let attention = self.attention.build(&model.attention, &model.rope, model.eps, weights)?;
        Ok(Layer { attention, norm: weights.norm(self.norm, model.eps)?, feed })
    }
}

impl MoeConfig {
    fn router(&self, weight: Weight, bias: Option<Tensor>, balance_coefficient: f64) -> Router {
        Router {
            weight,
            bias,
            score: self.score,
            top_k: self.top_k,
            groups: self.groups,
            top_groups: self.top_groups,
            normalize: self.normalize,
            scale: single(self.scale),
            balance: single(balance_coefficient),
        }
    }
}

impl Layer {
    pub(crate) fn prepare(&mut self, backend: &dyn Backend) -> Result<()> {
        self.attention.prepare(backend)?;
        match &mut self.feed {
            Feed::Dense(mlp) => mlp.prepare(backend),
            Feed::Moe(moe) => {
                moe.prepared = Some(moe.layer.prepare(backend)?);
                moe.layer.shared.as_mut().map_or(Ok(()), |shared| shared.prepare(backend))
            }
        }
    }

    pub(crate) fn forward(&self, c: Context<'_>, x: Tensor) -> Result<(Tensor, LayerSaved)> {
        let scope = c.backend.scope("attention", None);
        let (middle, attention) = self.attention.forward(c, x)?;
        drop(scope);
        let (y, normed, feed) = self.feed_forward(c, &middle)?;
        Ok((y, LayerSaved { attention, middle, normed, feed }))
    }

    /// The second half: norm, MLP or experts, residual.
    fn feed_forward(&self, c: Context<'_>, middle: &Tensor) -> Result<(Tensor, Normed, FeedSaved)> {
        let _scope = c.backend.scope(self.feed.name(), None);
        let mut normed = Normed::default();
        let n = normed.get(c.backend, &self.norm, middle)?;
        let (y, feed) = match &self.feed {
            Feed::Dense(mlp) => {
                let mut saved = MlpSaved::default();
                let y = mlp.forward(c.backend, c.tokens, &n, c.policy.mlp(), &mut saved)?;
                (sum(c.backend, &y, middle)?, FeedSaved::Dense(Box::new(saved)))
            }
            Feed::Moe(moe) => {
                let mut saved = MoeSaved::default();
                let counts = if c.counted { &moe.balancing.counts } else { &moe.uncounted };
                let (layer, experts, policy) = (&moe.layer, moe.prepared(), c.policy.moe());
                let y =
                    layer.forward(c.backend, c.tokens, experts, &n, None, Some(middle), counts, policy, &mut saved)?;
                (y, FeedSaved::Moe(Box::new(saved)))
            }
        };
        normed.settle(c.backend, c.policy.mlp_input)?;
        Ok((y, normed, feed))
    }

    /// The layer for new rows of several sequences, each on what is kept of it.
    pub(crate) fn decode(&self, c: Context<'_>, x: &Tensor, rows: &[NewRows], kept: &[Kept]) -> Result<Tensor> {
        let middle = self.attention.decode(c, x, rows, kept)?;
        Ok(self.feed_forward(c, &middle)?.0)
    }

    /// What it keeps of a token for generation, in elements.
    pub(crate) fn cached_widths(&self) -> [usize; 2] {
        self.attention.cached_widths()
    }

    /// The gradient of the layer's input.
    pub(crate) fn backward(&self, c: Context<'_>, dy: &Tensor, mut saved: LayerSaved) -> Result<Tensor> {
        let scope = c.backend.scope(self.feed.name(), None);
        let n = saved.normed.get(c.backend, &self.norm, &saved.middle)?;
        let d_normed = match (&self.feed, saved.feed) {
            (Feed::Dense(mlp), FeedSaved::Dense(s)) => mlp.backward(c.backend, c.tokens, &n, dy, *s)?,
            (Feed::Moe(moe), FeedSaved::Moe(s)) => {
                moe.layer.backward(c.backend, c.tokens, moe.prepared(), &n, dy, *s)?
            }
            _ => unreachable!("a layer's saved activations are of its own kind"),
        };
        let d_middle = saved.normed.backward(c.backend, &self.norm, &saved.middle, &d_normed, Some(dy))?;
        drop(scope);
        let _scope = c.backend.scope("attention", None);
        self.attention.backward(c, &d_middle, saved.attention)
    }
}

impl Experts {
    fn prepared(&self) -> &MoeExperts {
        self.prepared.as_ref().expect("Model::prepare follows every change of the weights")
    }
}
