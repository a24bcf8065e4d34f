//! The output head: final norm, logits, cross-entropy.

use dropless_core::ops::CrossEntropy;
use dropless_core::{DType, Result, Tensor};

use crate::context::{Context, alloc};
use crate::nn::{Norm, Weight, dgrad, forward, wgrad};

/// Norm and output matrix.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) norm: Norm,
    pub(crate) output: Weight,
}

/// The loss of each token, and the gradient of the head's input.
#[derive(Debug)]
pub(crate) struct HeadLoss {
    pub(crate) loss: Tensor,
    pub(crate) d_hidden: Tensor,
}

impl Head {
    /// f32 `[tokens, vocabulary]`.
    pub(crate) fn logits(&self, c: Context<'_>, hidden: &Tensor) -> Result<Tensor> {
        let (normed, _) = self.norm.forward(c.backend, hidden)?;
        forward(c.backend, c.tokens, &normed, &self.output, DType::F32)
    }

    /// The loss of each token.
    pub(crate) fn evaluate(&self, c: Context<'_>, hidden: &Tensor) -> Result<Tensor> {
        let logits = self.logits(c, hidden)?;
        let loss = alloc(c.backend, DType::F32, &[c.tokens.count()])?;
        let (targets, scale) = (&c.inputs.targets, &c.inputs.scale);
        CrossEntropy { logits: &logits, targets, scale, loss: &loss, d_logits: None }.run(c.backend)?;
        Ok(loss)
    }

    /// The loss, and the gradient of `hidden` plus `residual`; adds to the gradients of the head.
    pub(crate) fn step(
        &self,
        c: Context<'_>,
        hidden: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<HeadLoss> {
        let (b, tokens) = (c.backend, c.tokens);
        let (normed, rstd) = self.norm.forward(b, hidden)?;
        let logits = forward(b, tokens, &normed, &self.output, DType::F32)?;
        let loss = alloc(b, DType::F32, &[tokens.count()])?;
        let d_logits = alloc(b, hidden.dtype(), logits.shape())?;
        CrossEntropy { logits: &logits, targets, scale, loss: &loss, d_logits: Some(&d_logits) }.run(b)?;
        wgrad(b, tokens, &d_logits, &normed, &self.output)?;
        let d_normed = dgrad(b, tokens, &d_logits, &self.output, hidden.dtype())?;
        let d_hidden = self.norm.backward(b, hidden, &rstd, &d_normed, residual)?;
        Ok(HeadLoss { loss, d_hidden })
    }
}
