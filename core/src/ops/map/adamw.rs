//! AdamW (arXiv 1711.05101). NUMERICS.md, "Optimizer".

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, Values, distinct};
use crate::tensor::Tensor;

/// One step of AdamW on any number of parameters that share a weight decay. Works in place.
///
/// # Shape
/// grad, param, m, v: f32 of one length; param_bf16: bf16 of that length, written with the new parameters; clip: f32
/// `[2]` of [`crate::ops::ClipScale`]; step: f32 `[3]` = learning rate, 1 - beta1^t, 1 - beta2^t.
///
/// # Numerics
/// With g = grad * clip\[1\]: `m = fma(beta1, m, (1 - beta1) * g)`, `v = fma(beta2, v, ((1 - beta2) * g) * g)`,
/// `u = (m / c1) / (sqrt(v / c2) + eps)`, `param = param - lr * (decay * param)`, `param = param - lr * u`.
#[derive(Clone, Copy, Debug)]
pub struct AdamW<'a> {
    /// Gradient.
    pub grad: &'a Tensor,
    /// Norm and factor of [`crate::ops::ClipScale`].
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
    pub param_bf16: Option<&'a Tensor>,
}

op!(AdamW: read(grad, clip, step), update(param, m, v), write(param_bf16), value(beta1, beta2, eps, decay));

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
        for (field, out) in
            [("param", Some(self.param)), ("m", Some(self.m)), ("v", Some(self.v)), ("param_bf16", self.param_bf16)]
        {
            let Some(out) = out else { continue };
            distinct(Self::OP, field, out, &others)?;
            others.push(out);
        }
        if let Some(param_bf16) = self.param_bf16 {
            Arg::new(Self::OP, "param_bf16", param_bf16).dtype(&[DType::Bf16])?.len(len, "as param")?;
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

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (grad, clip, step) =
            (Values::read(memory, self.grad)?, Values::read(memory, self.clip)?, Values::read(memory, self.step)?);
        let (mut param, mut m, mut v) =
            (Values::read(memory, self.param)?, Values::read(memory, self.m)?, Values::read(memory, self.v)?);
        let mut param_bf16 = Values::read_opt(memory, self.param_bf16)?;
        let (clip, step) = (clip.float(1), [step.float(0), step.float(1), step.float(2)]);
        for i in 0..param.len() {
            let (mut p, mut m1, mut m2) = ([param.float(i)], [m.float(i)], [v.float(i)]);
            self.update(clip, step, &[grad.float(i)], &mut p, &mut m1, &mut m2);
            for (values, [value]) in [(&mut param, p), (&mut m, m1), (&mut v, m2)] {
                values.set_float(i, value);
            }
            if let Some(param_bf16) = &mut param_bf16 {
                param_bf16.set_float(i, p[0]);
            }
        }
        [Some(param), Some(m), Some(v), param_bf16].iter().flatten().try_for_each(|values| values.write(memory))
    }
}
