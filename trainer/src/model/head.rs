//! The output head: final norm, logits, cross-entropy.

use dropless_core::nn::{Tokens, Weight, dgrad, forward, wgrad};
use dropless_core::ops::CrossEntropy;
use dropless_core::{Backend, DType, Tensor};

use super::alloc;
use super::attention::Gain;
use crate::error::Result;

/// Norm and output matrix.
#[derive(Debug)]
pub(super) struct Head {
    norm: Gain,
    output: Weight,
}

/// The loss of each token, and the gradient of the head's input.
pub(super) struct HeadLoss {
    pub(super) loss: Tensor,
    pub(super) d_hidden: Tensor,
}

impl Head {
    pub(super) fn new(norm: Gain, output: Weight) -> Head {
        Head { norm, output }
    }

    /// f32 `[tokens, vocabulary]`.
    pub(super) fn logits(&self, backend: &dyn Backend, tokens: &Tokens, hidden: &Tensor) -> Result<Tensor> {
        let (normed, _) = self.norm.forward(backend, hidden)?;
        Ok(forward(backend, tokens, &normed, &self.output, DType::F32)?)
    }

    /// The loss of each token.
    pub(super) fn evaluate(
        &self,
        backend: &dyn Backend,
        tokens: &Tokens,
        hidden: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
    ) -> Result<Tensor> {
        let logits = self.logits(backend, tokens, hidden)?;
        let loss = alloc(backend, DType::F32, &[tokens.count()])?;
        CrossEntropy { logits: &logits, targets, scale, loss: &loss, d_logits: None }.run(backend)?;
        Ok(loss)
    }

    /// The loss, and the gradient of `hidden` plus `residual`; adds to the gradients of the head.
    pub(super) fn step(
        &self,
        backend: &dyn Backend,
        tokens: &Tokens,
        hidden: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<HeadLoss> {
        let (normed, rstd) = self.norm.forward(backend, hidden)?;
        let logits = forward(backend, tokens, &normed, &self.output, DType::F32)?;
        let loss = alloc(backend, DType::F32, &[tokens.count()])?;
        let d_logits = alloc(backend, hidden.dtype(), logits.shape())?;
        CrossEntropy { logits: &logits, targets, scale, loss: &loss, d_logits: Some(&d_logits) }.run(backend)?;
        wgrad(backend, tokens, &d_logits, &normed, &self.output)?;
        let d_normed = dgrad(backend, tokens, &d_logits, &self.output, hidden.dtype())?;
        let d_hidden = self.norm.backward(backend, hidden, &rstd, &d_normed, residual)?;
        Ok(HeadLoss { loss, d_hidden })
    }
}
