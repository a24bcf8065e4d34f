//! The optimizer: gradient norm, AdamW (arXiv 1711.05101), and the selection-bias update of DeepSeek-V3. NUMERICS.md,
//! "Optimizer".

use std::cmp::Ordering;

use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, distinct, number};
use crate::tensor::Tensor;

/// The global gradient norm and the factor that clips it.
///
/// # Shape
/// squares: f32, sums of squares in a fixed order; out: f32 `[2]`: norm, factor.
///
/// # Numerics
/// norm = sqrt(squares added in order); factor = `max_norm / norm` if norm > max_norm, else 1. A NaN norm gives a NaN
/// factor; `max_norm` 0 never clips.
#[derive(Clone, Copy, Debug)]
pub struct ClipScale<'a> {
    /// Sums of squares.
    pub squares: &'a Tensor,
    /// The largest norm that is left alone; 0 for no clipping.
    pub max_norm: f32,
    /// Norm and factor, written.
    pub out: &'a Tensor,
}

op!(ClipScale: read(squares), write(out), value(max_norm));

impl ClipScale<'_> {
    pub(crate) const OP: &'static str = "clip_scale";

    pub(super) fn check(&self) -> Result<()> {
        Arg::new(Self::OP, "squares", self.squares).dtype(&[DType::F32])?;
        number(Self::OP, "max_norm", self.max_norm >= 0.0, "0 or more", self.max_norm)?;
        Arg::new(Self::OP, "out", self.out).dtype(&[DType::F32])?.len(2, "norm and factor")?;
        distinct(Self::OP, "out", self.out, &[self.squares])
    }

    /// Norm and factor.
    pub fn norm_and_factor(squares: &[f32], max_norm: f32) -> [f32; 2] {
        let norm = squares.iter().fold(0.0f32, |sum, square| sum + square).sqrt();
        let factor = if norm.is_nan() {
            norm
        } else if max_norm > 0.0 && norm > max_norm {
            max_norm / norm
        } else {
            1.0
        };
        [norm, factor]
    }
}

/// One step of AdamW on any number of parameters that share a weight decay. Works in place.
///
/// # Shape
/// grad, param, m, v: f32 of one length; half: bf16 of that length, written with the new parameters; clip: f32 `[2]` of
/// [`ClipScale`]; step: f32 `[3]` = learning rate, 1 - beta1^t, 1 - beta2^t.
///
/// # Numerics
/// With g = grad * clip\[1\]: `m = fma(beta1, m, (1 - beta1) * g)`, `v = fma(beta2, v, ((1 - beta2) * g) * g)`,
/// `u = (m / c1) / (sqrt(v / c2) + eps)`, `param = param - lr * (decay * param)`, `param = param - lr * u`.
#[derive(Clone, Copy, Debug)]
pub struct AdamW<'a> {
    /// Gradient.
    pub grad: &'a Tensor,
    /// Norm and factor of [`ClipScale`].
    pub clip: &'a Tensor,
    /// Learning rate and the two bias corrections.
    pub step: &'a Tensor,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root.
    pub eps: f32,
    /// Decoupled weight decay.
    pub decay: f32,
    /// Master weights, updated.
    pub param: &'a Tensor,
    /// First moment, updated.
    pub m: &'a Tensor,
    /// Second moment, updated.
    pub v: &'a Tensor,
    /// Weights rounded to bf16, written.
    pub half: Option<&'a Tensor>,
}

op!(AdamW: read(grad, clip, step), update(param, m, v), write(half), value(beta1, beta2, eps, decay));

impl AdamW<'_> {
    pub(crate) const OP: &'static str = "adamw";

    pub(super) fn check(&self) -> Result<()> {
        let len = self.param.len();
        for (field, tensor) in [("grad", self.grad), ("param", self.param), ("m", self.m), ("v", self.v)] {
            Arg::new(Self::OP, field, tensor).dtype(&[DType::F32])?.len(len, "as param")?;
        }
        Arg::new(Self::OP, "clip", self.clip).dtype(&[DType::F32])?.len(2, "norm and factor")?;
        Arg::new(Self::OP, "step", self.step).dtype(&[DType::F32])?.len(3, "rate and two corrections")?;
        let mut others = vec![self.grad, self.clip, self.step];
        for (field, out) in [("param", Some(self.param)), ("m", Some(self.m)), ("v", Some(self.v)), ("half", self.half)]
        {
            let Some(out) = out else { continue };
            distinct(Self::OP, field, out, &others)?;
            others.push(out);
        }
        if let Some(half) = self.half {
            Arg::new(Self::OP, "half", half).dtype(&[DType::Bf16])?.len(len, "as param")?;
        }
        Ok(())
    }

    /// Any number of parameters; `clip` is the factor, `step` the rate and the two corrections.
    #[inline(always)]
    pub fn update(&self, clip: f32, step: [f32; 3], grad: &[f32], param: &mut [f32], m: &mut [f32], v: &mut [f32]) {
        let (beta1, beta2, [rate, c1, c2]) = (self.beta1, self.beta2, step);
        for (((g, p), m), v) in grad.iter().zip(param).zip(m).zip(v) {
            let g = g * clip;
            *m = beta1.mul_add(*m, (1.0 - beta1) * g);
            *v = beta2.mul_add(*v, ((1.0 - beta2) * g) * g);
            let u = (*m / c1) / ((*v / c2).sqrt() + self.eps);
            let decayed = *p - rate * (self.decay * *p);
            *p = decayed - rate * u;
        }
    }
}

/// Aux-loss-free balancing (arXiv 2408.15664): `bias += rate * sign(mean - count)`, in place.
///
/// # Shape
/// counts: u32 `[parts, experts]`, added over the parts (the ranks); bias: f32 `[experts]`.
///
/// # Numerics
/// The comparison is exact: `count * experts` against the total, in 64-bit integers. An equal count changes nothing.
#[derive(Clone, Copy, Debug)]
pub struct BiasUpdate<'a> {
    /// Choices of each expert in this step.
    pub counts: &'a Tensor,
    /// Step of the bias.
    pub rate: f32,
    /// The bias, updated.
    pub bias: &'a Tensor,
}

op!(BiasUpdate: read(counts), update(bias), value(rate));

impl BiasUpdate<'_> {
    pub(crate) const OP: &'static str = "bias_update";

    pub(super) fn check(&self) -> Result<()> {
        let experts = self.bias.len();
        Arg::new(Self::OP, "bias", self.bias).dtype(&[DType::F32])?;
        Arg::new(Self::OP, "counts", self.counts).dtype(&[DType::U32])?;
        number(
            Self::OP,
            "counts",
            self.counts.cols() == experts,
            &format!("{experts} columns, one for each expert"),
            self.counts.cols(),
        )?;
        distinct(Self::OP, "bias", self.bias, &[self.counts])
    }

    /// All experts: `counts` is `[parts, bias.len()]`.
    pub fn update(counts: &[u32], rate: f32, bias: &mut [f32]) {
        let experts = bias.len();
        let total: u64 = counts.iter().map(|&c| u64::from(c)).sum();
        for (e, bias) in bias.iter_mut().enumerate() {
            let count: u64 = counts.iter().skip(e).step_by(experts).map(|&c| u64::from(c)).sum();
            match (count * experts as u64).cmp(&total) {
                Ordering::Less => *bias += rate,
                Ordering::Equal => {}
                Ordering::Greater => *bias -= rate,
            }
        }
    }
}
