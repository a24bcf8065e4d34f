//! RMSNorm with its weight, and a norm's output as a saved activation.

use dropless_core::ops::{RmsNorm, RmsNormGrad};
use dropless_core::{Backend, DType, Memory, Result, Tensor};

use super::{Policy, Saved, Weight};

/// The weight of an RMSNorm, f32 `[columns]`, with its gradient f32 `[shards, columns]`.
#[derive(Clone, Debug)]
pub struct Norm {
    /// The weight.
    pub weight: Weight,
    /// Added to the mean square.
    pub eps: f32,
}

impl Norm {
    /// The normalised rows, and the reciprocal root mean square of each, f32 `[rows]`.
    ///
    /// # Errors
    /// Those of the op.
    pub fn forward(&self, backend: &dyn Backend, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let out = backend.alloc(x.dtype(), x.shape(), Memory::Device)?;
        let rstd = backend.alloc(DType::F32, &[x.rows()], Memory::Device)?;
        RmsNorm { x, weight: &self.weight.value, eps: self.eps, out: &out, rstd: &rstd }.run(backend)?;
        Ok((out, rstd))
    }

    /// The gradient of x, plus `residual`; adds to the norm weight's gradient.
    ///
    /// # Errors
    /// Those of the op.
    pub fn backward(
        &self,
        backend: &dyn Backend,
        x: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let dx = backend.alloc(x.dtype(), x.shape(), Memory::Device)?;
        let (weight, d_weight) = (&self.weight.value, self.weight.grad()?);
        RmsNormGrad { dy, x, weight, rstd, residual, dx: &dx, d_weight }.run(backend)?;
        Ok(dx)
    }
}

/// A norm's output that may be dropped, with the statistics that stay.
#[derive(Debug, Default)]
pub struct Normed {
    out: Saved,
    rstd: Option<Tensor>,
}

impl Normed {
    /// The norm of x, loaded or computed.
    ///
    /// # Errors
    /// Those of the op.
    pub fn get(&mut self, backend: &dyn Backend, norm: &Norm, x: &Tensor) -> Result<Tensor> {
        if let Some(out) = self.out.load(backend)? {
            return Ok(out);
        }
        let (out, rstd) = norm.forward(backend, x)?;
        self.rstd = Some(rstd);
        Ok(self.out.set(out))
    }

    /// See [`Saved::settle`].
    ///
    /// # Errors
    /// A failure of the device.
    pub fn settle(&mut self, backend: &dyn Backend, policy: Policy) -> Result<()> {
        self.out.settle(backend, policy)
    }

    /// See [`Saved::prefetch`].
    ///
    /// # Errors
    /// A failure of the device.
    pub fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        self.out.prefetch(backend)
    }

    /// The gradient of x; the statistics are those of the forward pass, which came before.
    ///
    /// # Errors
    /// Those of the op.
    pub fn backward(
        &self,
        backend: &dyn Backend,
        norm: &Norm,
        x: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let rstd = self.rstd.as_ref().expect("a backward pass follows a forward pass");
        norm.backward(backend, x, rstd, dy, residual)
    }
}
