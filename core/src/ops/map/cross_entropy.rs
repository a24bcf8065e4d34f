//! Cross-entropy of the next token, with its gradient. NUMERICS.md, "Row-wise ops".

use crate::backend::Backend;
use crate::error::Result;
use crate::numerics::{math, reduce};
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, Values, distinct};
use crate::tensor::Tensor;

/// `loss = log(sum(exp(logits))) - logits[target]`, and `d_logits = (softmax(logits) - onehot(target)) * scale`.
///
/// # Shape
/// logits: `[tokens, vocabulary]`; targets: u32 `[tokens]` (none of the vocabulary, as [`crate::ops::NONE`]: loss 0,
/// gradient 0); scale: f32 `[1]` (1 / valid tokens of the whole step); loss: f32 `[tokens]`, unscaled; d_logits: as
/// logits (any float type).
///
/// # Numerics
/// max over the row (NaN ignored), then s = row reduction of exp(x - max); `loss = log(s) - (x[target] - max)`, which
/// does not cancel however large the logits are; `d = (exp(x - max) / s - [target]) * scale`.
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

op!(CrossEntropy: read(logits, targets, scale), write(loss, d_logits));

impl CrossEntropy<'_> {
    pub(crate) const OP: &'static str = "cross_entropy";

    pub(super) fn check(&self) -> Result<()> {
        let tokens = self.logits.rows();
        Arg::new(Self::OP, "logits", self.logits).dtype(FLOAT)?;
        Arg::new(Self::OP, "targets", self.targets).dtype(&[DType::U32])?.len(tokens, "one for each token")?;
        Arg::new(Self::OP, "scale", self.scale).dtype(&[DType::F32])?.len(1, "one number")?;
        Arg::new(Self::OP, "loss", self.loss).dtype(&[DType::F32])?.len(tokens, "one for each token")?;
        let mut inputs = vec![self.logits, self.targets, self.scale];
        distinct(Self::OP, "loss", self.loss, &inputs)?;
        if let Some(d_logits) = self.d_logits {
            Arg::new(Self::OP, "d_logits", d_logits).dtype(FLOAT)?.len(self.logits.len(), "as logits")?;
            inputs.push(self.loss);
            distinct(Self::OP, "d_logits", d_logits, &inputs)?;
        }
        Ok(())
    }

    /// One row with a target: writes `exp(x - max)` to `exps`, and returns the loss and `s`.
    #[inline(always)]
    pub fn row(logits: &[f32], target: usize, exps: &mut [f32]) -> (f32, f32) {
        let max = reduce::max(logits);
        for (e, x) in exps.iter_mut().zip(logits) {
            *e = math::exp(x - max);
        }
        let sum = reduce::row(exps.len(), |i| exps[i]);
        (math::log(sum) - (logits[target] - max), sum)
    }

    /// Its gradient, from the exponentials and their sum, in place.
    #[inline(always)]
    pub fn grad_row(exps: &mut [f32], sum: f32, target: usize, scale: f32) {
        let at_target = (exps[target] / sum - 1.0) * scale;
        for e in exps.iter_mut() {
            *e = *e / sum * scale;
        }
        exps[target] = at_target;
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (logits, targets) = (Values::read(memory, self.logits)?, Values::read(memory, self.targets)?);
        let scale = Values::read(memory, self.scale)?.float(0);
        let (mut loss, mut d_logits) = (Values::read(memory, self.loss)?, Values::read_opt(memory, self.d_logits)?);
        for token in 0..self.logits.rows() {
            let target = targets.word(token) as usize;
            let mut d = vec![0.0; self.logits.cols()];
            if target < self.logits.cols() {
                let (token_loss, sum) = CrossEntropy::row(&logits.row(token), target, &mut d);
                CrossEntropy::grad_row(&mut d, sum, target, scale);
                loss.set_float(token, token_loss);
            } else {
                loss.set_float(token, 0.0);
            }
            if let Some(d_logits) = &mut d_logits {
                d_logits.set_row(token, &d);
            }
        }
        loss.write(memory)?;
        d_logits.map_or(Ok(()), |d_logits| d_logits.write(memory))
    }
}
