//! The multi-token-prediction module of DeepSeek-V3 (arXiv 2412.19437, section 2.2):
//! `layer(project([norm(embedding of the next token), norm(h)]))`, then the head.

use dropless_core::ops::CopyColumns;
use dropless_core::{Result, Tensor};

use crate::architecture::Architecture;
use crate::context::{Context, NextInputs, alloc};
use crate::embedding::Embedding;
use crate::head::{Head, HeadLoss};
use crate::layer::{self, Layer};
use crate::nn::{Norm, Weight, dgrad, forward, wgrad};
use crate::params::{Builder, Id};

/// The parameters, by their place in the arenas.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) embedding_norm: Id,
    pub(crate) hidden_norm: Id,
    pub(crate) project: Id,
    pub(crate) layer: layer::Description,
    pub(crate) head_norm: Id,
}

/// The module, or None where the architecture has none.
pub(crate) fn describe(builder: &mut Builder, model: &Architecture) -> Option<Description> {
    let feed = model.next.as_ref()?;
    let index = model.layers.len();
    let (h, name) = (model.hidden, |part: &str| format!("model.layers.{index}.{part}.weight"));
    Some(Description {
        embedding_norm: builder.norm(name("enorm"), h),
        hidden_norm: builder.norm(name("hnorm"), h),
        project: builder.matrix(name("eh_proj"), &[h, 2 * h]),
        layer: layer::describe(builder, model, feed, index),
        head_norm: builder.norm(name("shared_head.norm"), h),
    })
}

/// The module.
#[derive(Debug)]
pub(crate) struct NextToken {
    pub(crate) embedding_norm: Norm,
    pub(crate) hidden_norm: Norm,
    pub(crate) project: Weight,
    pub(crate) layer: Layer,
    pub(crate) head: Head,
}

/// What a step of the module leaves.
#[derive(Debug)]
pub(crate) struct NextStep {
    /// The loss of each token.
    pub(crate) loss: Tensor,
    /// The auxiliary loss of its layer.
    pub(crate) balance: Option<Tensor>,
    /// The gradient of the hidden state.
    pub(crate) d_hidden: Tensor,
}

impl NextToken {
    /// Forward and backward; adds to the gradients of the module, the head and the embedding.
    pub(crate) fn step(
        &self,
        c: Context<'_>,
        inputs: &NextInputs,
        embedding: &Embedding,
        hidden: &Tensor,
    ) -> Result<NextStep> {
        let (b, tokens, element) = (c.backend, c.tokens, hidden.dtype());
        let (t, h) = (hidden.rows(), hidden.cols());
        let embedded = embedding.forward(b, &inputs.ids)?;
        let (e, e_rstd) = self.embedding_norm.forward(b, &embedded)?;
        let (n, n_rstd) = self.hidden_norm.forward(b, hidden)?;
        let both = alloc(b, element, &[t, 2 * h])?;
        CopyColumns { x: &e, x_column: 0, out: &both, out_column: 0, width: h }.run(b)?;
        CopyColumns { x: &n, x_column: 0, out: &both, out_column: h, width: h }.run(b)?;
        let x = forward(b, tokens, &both, &self.project, element)?;
        let (y, saved) = self.layer.forward(c, x)?;
        let balance = saved.balance_loss().cloned();

        let HeadLoss { loss, d_hidden } = self.head.step(c, &y, &inputs.targets, &inputs.scale, None)?;
        let dx = self.layer.backward(c, &d_hidden, saved)?;
        wgrad(b, tokens, &dx, &both, &self.project)?;
        let d_both = dgrad(b, tokens, &dx, &self.project, element)?;
        let (de, dn) = (alloc(b, element, &[t, h])?, alloc(b, element, &[t, h])?);
        CopyColumns { x: &d_both, x_column: 0, out: &de, out_column: 0, width: h }.run(b)?;
        CopyColumns { x: &d_both, x_column: h, out: &dn, out_column: 0, width: h }.run(b)?;
        let d_embedded = self.embedding_norm.backward(b, &embedded, &e_rstd, &de, None)?;
        embedding.backward(b, &inputs.ids, &d_embedded)?;
        let d_hidden = self.hidden_norm.backward(b, hidden, &n_rstd, &dn, None)?;
        Ok(NextStep { loss, balance, d_hidden })
    }
}
