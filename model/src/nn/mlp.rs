//! The SwiGLU MLP over all tokens: dense layers and shared experts.

use super::quantized::{FORWARD, WGRAD};
use super::{Linear, Policy, Saved, Tokens};
use dropless_core::Backend;
use dropless_core::Result;
use dropless_core::ops::{Swiglu, SwigluGrad};
use dropless_core::{Memory, Tensor};

/// `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// Gate rows, then up rows: `[1, 2 * i, h]`.
    pub gate_up: Linear,
    /// `[1, h, i]`.
    pub down: Linear,
}

/// What the backward pass of an [`Mlp`] or of experts needs.
#[derive(Debug, Default)]
pub struct MlpSaved {
    /// Gate and up.
    pub gate_up: Saved,
    /// The input of the down projection.
    pub hidden: Saved,
}

impl MlpSaved {
    /// See [`Saved::prefetch`].
    ///
    /// # Errors
    /// A failure of the device.
    pub fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        self.gate_up.prefetch(backend)?;
        self.hidden.prefetch(backend)
    }
}

/// Policies of [`MlpSaved`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MlpPolicy {
    /// Gate and up.
    pub gate_up: Policy,
    /// The input of the down projection.
    pub hidden: Policy,
}

impl Mlp {
    /// See [`Linear::prepare`].
    ///
    /// # Errors
    /// Those of the quantization.
    pub fn prepare(&mut self, backend: &dyn Backend) -> Result<()> {
        self.gate_up.prepare(backend)?;
        self.down.prepare(backend)
    }

    fn gate_up(&self, backend: &dyn Backend, tokens: &Tokens, x: &Tensor, saved: &mut MlpSaved) -> Result<Tensor> {
        if let Some(gate_up) = saved.gate_up.load(backend)? {
            return Ok(gate_up);
        }
        let x = self.gate_up.recipe.rows(backend, tokens, x, FORWARD)?;
        Ok(saved.gate_up.set(self.gate_up.forward(backend, tokens, &x)?))
    }

    fn hidden(&self, backend: &dyn Backend, tokens: &Tokens, x: &Tensor, saved: &mut MlpSaved) -> Result<Tensor> {
        if let Some(hidden) = saved.hidden.load(backend)? {
            return Ok(hidden);
        }
        let gate_up = self.gate_up(backend, tokens, x, saved)?;
        let hidden = backend.alloc(x.dtype(), &[tokens.count(), gate_up.cols() / 2], Memory::Device)?;
        Swiglu { gate_up: &gate_up, weight: None, limit: None, out: &hidden }.run(backend)?;
        Ok(saved.hidden.set(hidden))
    }

    /// The MLP of x `[tokens, h]`.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward(
        &self,
        backend: &dyn Backend,
        tokens: &Tokens,
        x: &Tensor,
        policy: MlpPolicy,
        saved: &mut MlpSaved,
    ) -> Result<Tensor> {
        let hidden = self.hidden(backend, tokens, x, saved)?;
        let y = self.down.forward(backend, tokens, &self.down.recipe.rows(backend, tokens, &hidden, FORWARD)?)?;
        saved.gate_up.settle(backend, policy.gate_up)?;
        saved.hidden.settle(backend, policy.hidden)?;
        Ok(y)
    }

    /// The gradient of x for the gradient `dy` of the result; adds to the weights' gradients.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn backward(
        &self,
        backend: &dyn Backend,
        tokens: &Tokens,
        x: &Tensor,
        dy: &Tensor,
        mut saved: MlpSaved,
    ) -> Result<Tensor> {
        let gate_up = self.gate_up(backend, tokens, x, &mut saved)?;
        let hidden = self.hidden(backend, tokens, x, &mut saved)?;
        let hidden = self.down.recipe.rows(backend, tokens, &hidden, WGRAD)?;
        let d_hidden = self.down.backward(backend, tokens, dy, &hidden)?;
        let d_gate_up = backend.alloc(dy.dtype(), gate_up.shape(), Memory::Device)?;
        SwigluGrad {
            gate_up: &gate_up,
            weight: None,
            limit: None,
            d_out: &d_hidden,
            d_gate_up: &d_gate_up,
            d_weight: None,
        }
        .run(backend)?;
        let x = self.gate_up.recipe.rows(backend, tokens, x, WGRAD)?;
        self.gate_up.backward(backend, tokens, &d_gate_up, &x)
    }
}
