//! Attention, by kind. Each kind owns its configuration, parameters, checks, arithmetic count and saved activations:
//! [`mla`] is multi-head latent attention, [`gqa`] grouped-query attention. `softmax` is what they share.

pub mod gqa;
pub mod mla;
mod softmax;

use dropless_core::{Backend, Result, Tensor};

use crate::cache::{Kept, NewRows};
use crate::context::Context;
use crate::params::{Builder, Id};
use crate::rope::Rope;
use crate::weights::Weights;

use gqa::Gqa;
use mla::Mla;

/// What kind of attention a model has, with its extents.
#[derive(Clone, Debug, PartialEq)]
pub enum AttentionConfig {
    /// Multi-head latent attention.
    Mla(mla::Config),
    /// Grouped-query attention.
    Gqa(gqa::Config),
}

impl AttentionConfig {
    /// Number of query heads.
    pub fn heads(&self) -> usize {
        match self {
            AttentionConfig::Mla(c) => c.heads,
            AttentionConfig::Gqa(c) => c.heads,
        }
    }

    /// Elements of a query and of a value of one head: the extents of the scores' and of the values' products.
    pub fn head_dims(&self) -> (usize, usize) {
        match self {
            AttentionConfig::Mla(c) => (c.nope + c.rope, c.v),
            AttentionConfig::Gqa(c) => (c.head_dim, c.head_dim),
        }
    }

    /// Elements of a head that carry the position.
    pub fn rotary_dim(&self) -> usize {
        match self {
            AttentionConfig::Mla(c) => c.rope,
            AttentionConfig::Gqa(c) => c.head_dim,
        }
    }

    /// Parameters in the matrix products of one layer, for a residual stream of `h`; in f64, which no extents overflow.
    pub fn parameters(&self, h: usize) -> f64 {
        match self {
            AttentionConfig::Mla(c) => c.parameters(h),
            AttentionConfig::Gqa(c) => c.parameters(h),
        }
    }

    /// Verifies the extents on their own.
    ///
    /// # Errors
    /// A line with the rule that does not hold.
    pub fn check(&self) -> std::result::Result<(), String> {
        match self {
            AttentionConfig::Mla(c) => c.check(),
            AttentionConfig::Gqa(c) => c.check(),
        }
    }

    pub(crate) fn describe(&self, builder: &mut Builder, h: usize, layer: usize) -> Description {
        match self {
            AttentionConfig::Mla(c) => Description::Mla(c.describe(builder, h, layer)),
            AttentionConfig::Gqa(c) => Description::Gqa(c.describe(builder, h, layer)),
        }
    }
}

/// The parameters of an attention, by their place in the arenas.
#[derive(Debug)]
pub(crate) enum Description {
    Mla(mla::Description),
    Gqa(gqa::Description),
}

/// Attention with its norm and its residual: `x + o(attention(norm(x)))`.
#[derive(Debug)]
pub(crate) enum Attention {
    Mla(Box<Mla>),
    Gqa(Box<Gqa>),
}

/// What the backward pass of an [`Attention`] needs.
#[derive(Debug)]
pub(crate) enum AttentionSaved {
    Mla(Box<mla::Saved>),
    Gqa(Box<gqa::Saved>),
}

impl Description {
    /// The projections.
    pub(crate) fn linear(&self) -> Vec<Id> {
        match self {
            Description::Mla(d) => d.linear(),
            Description::Gqa(d) => d.linear(),
        }
    }

    pub(crate) fn build(
        &self,
        config: &AttentionConfig,
        rope: &Rope,
        eps: f32,
        weights: Weights<'_>,
    ) -> Result<Attention> {
        match (self, config) {
            (Description::Mla(d), AttentionConfig::Mla(c)) => {
                Ok(Attention::Mla(Box::new(d.build(c, rope, eps, weights)?)))
            }
            (Description::Gqa(d), AttentionConfig::Gqa(c)) => Ok(Attention::Gqa(Box::new(d.build(c, eps, weights)?))),
            _ => unreachable!("an attention is built from its own configuration"),
        }
    }
}

impl Attention {
    /// Brings the projections into the form of their products.
    pub(crate) fn prepare(&mut self, backend: &dyn Backend) -> Result<()> {
        match self {
            Attention::Mla(a) => a.prepare(backend),
            Attention::Gqa(a) => a.prepare(backend),
        }
    }

    pub(crate) fn forward(&self, c: Context<'_>, x: Tensor) -> Result<(Tensor, AttentionSaved)> {
        match self {
            Attention::Mla(a) => a.forward(c, x).map(|(y, saved)| (y, AttentionSaved::Mla(Box::new(saved)))),
            Attention::Gqa(a) => a.forward(c, x).map(|(y, saved)| (y, AttentionSaved::Gqa(Box::new(saved)))),
        }
    }

    /// The same for new rows of several sequences, each on what is kept of it.
    pub(crate) fn decode(&self, c: Context<'_>, x: &Tensor, rows: &[NewRows], kept: &[Kept]) -> Result<Tensor> {
        match self {
            Attention::Mla(a) => a.decode(c, x, rows, kept),
            Attention::Gqa(a) => a.decode(c, x, rows, kept),
        }
    }

    /// What it keeps of a token for generation, in elements.
    pub(crate) fn cached_widths(&self) -> [usize; 2] {
        match self {
            Attention::Mla(a) => a.cached_widths(),
            Attention::Gqa(a) => a.cached_widths(),
        }
    }

    /// The gradient of x for the gradient `dy` of the result.
    pub(crate) fn backward(&self, c: Context<'_>, dy: &Tensor, saved: AttentionSaved) -> Result<Tensor> {
        match (self, saved) {
            (Attention::Mla(a), AttentionSaved::Mla(saved)) => a.backward(c, dy, *saved),
            (Attention::Gqa(a), AttentionSaved::Gqa(saved)) => a.backward(c, dy, *saved),
            _ => unreachable!("a layer's saved activations are of its own kind"),
        }
    }
}

impl AttentionSaved {
    /// Begins to bring back what is offloaded, in the order in which the backward pass takes it.
    pub(crate) fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        match self {
            AttentionSaved::Mla(saved) => saved.prefetch(backend),
            AttentionSaved::Gqa(saved) => saved.prefetch(backend),
        }
    }
}
