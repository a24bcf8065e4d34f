//! Cross-entropy of the next token, with its gradient.

use crate::error::Result;
use crate::ops::{Arg, DType, distinct};
use crate::tensor::Tensor;

/// `loss = lse(logits) - logits[target]`, and `d_logits = (softmax(logits) - onehot(target)) * scale`.
///
/// # Shape
/// logits: `[tokens, vocabulary]`; targets: u32 `[tokens]` ([`crate::ops::NONE`]: loss 0, gradient 0); scale: f32 `[1]`
/// (1 / valid tokens of the whole step); loss: f32 `[tokens]`, unscaled; d_logits: as logits (any float type).
///
/// # Numerics
/// max over the row, then s = row reduction of exp(x - max), `lse = max + log(s)`,
/// `d = (exp(x - max) / s - [target]) * scale`.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// Logits.
    pub logits: &'a Tensor,
    /// Next tokens.
    pub targets: &'a Tensor,
    /// Factor of the gradient.
    pub scale: &'a Tensor,
    /// Loss of each token, written.
    pub loss: &'a Tensor,
    /// Gradient, written; none for evaluation.
    pub d_logits: Option<&'a Tensor>,
}

impl CrossEntropy<'_> {
    pub(super) const OP: &'static str = "cross_entropy";

    pub(super) fn check(&self) -> Result<()> {
        let tokens = self.logits.rows();
        Arg::new(Self::OP, "logits", self.logits).dtype(crate::ops::FLOAT)?;
        Arg::new(Self::OP, "targets", self.targets).dtype(&[DType::U32])?.len(tokens, "one for each token")?;
        Arg::new(Self::OP, "scale", self.scale).dtype(&[DType::F32])?.len(1, "one number")?;
        Arg::new(Self::OP, "loss", self.loss).dtype(&[DType::F32])?.len(tokens, "one for each token")?;
        let mut inputs = vec![self.logits, self.targets, self.scale];
        distinct(Self::OP, "loss", self.loss, &inputs)?;
        if let Some(d_logits) = self.d_logits {
            Arg::new(Self::OP, "d_logits", d_logits).dtype(crate::ops::FLOAT)?.len(self.logits.len(), "as logits")?;
            inputs.push(self.loss);
            distinct(Self::OP, "d_logits", d_logits, &inputs)?;
        }
        Ok(())
    }
}
