//! Linear layers `y = x w^T` over all tokens of a rank, without bias.

use dropless_core::ops::{GemmKind, GroupedGemm, Operand};
use dropless_core::{Backend, DType, Error, Memory, Result, Tensor};

use super::Tokens;

/// A weight and where its gradient goes.
#[derive(Clone, Debug)]
pub struct Weight {
    /// `[1, n, k]` in the type of the activations it meets (experts: `[local experts, n, k]`).
    pub value: Tensor,
    /// f32 `[shards, n, k]`, added to (experts: `[expert shards, local experts, n, k]`); None where nothing is trained.
    pub grad: Option<Tensor>,
}

impl Weight {
    /// A weight without a gradient: for a forward pass alone.
    pub fn frozen(value: Tensor) -> Weight {
        Weight { value, grad: None }
    }

    /// Where the gradient goes.
    ///
    /// # Errors
    /// [`Error::Argument`] when nothing is trained.
    pub fn grad(&self) -> Result<&Tensor> {
        self.grad.as_ref().ok_or_else(|| Error::Argument {
            op: "backward",
            field: "grad",
            expected: "a weight with a gradient".into(),
            found: format!("{:?} without one", self.value),
        })
    }
}

/// `x w^T` in the type `out`.
///
/// # Shape
/// x: `[tokens, k]`; result: `[tokens, n]`.
///
/// # Errors
/// Those of [`GroupedGemm`] and of an allocation; so below.
pub fn forward(backend: &dyn Backend, tokens: &Tokens, x: &Tensor, w: &Weight, out: DType) -> Result<Tensor> {
    let out = backend.alloc(out, &[tokens.count(), w.value.shape()[1]], Memory::Device)?;
    GroupedGemm {
        kind: GemmKind::Forward,
        a: Operand::plain(x),
        b: Operand::plain(&w.value),
        offsets: tokens.whole(),
        out: &out,
        accumulate: false,
    }
    .run(backend)?;
    Ok(out)
}

/// `dy w`: the gradient of x, in the type `out`.
///
/// # Errors
/// As [`forward`].
pub fn dgrad(backend: &dyn Backend, tokens: &Tokens, dy: &Tensor, w: &Weight, out: DType) -> Result<Tensor> {
    let out = backend.alloc(out, &[tokens.count(), w.value.shape()[2]], Memory::Device)?;
    GroupedGemm {
        kind: GemmKind::Dgrad,
        a: Operand::plain(dy),
        b: Operand::plain(&w.value),
        offsets: tokens.whole(),
        out: &out,
        accumulate: false,
    }
    .run(backend)?;
    Ok(out)
}

/// Adds `dy^T x` of each shard to the weight's gradient.
///
/// # Errors
/// As [`forward`], and [`Weight::grad`]'s.
pub fn wgrad(backend: &dyn Backend, tokens: &Tokens, dy: &Tensor, x: &Tensor, w: &Weight) -> Result<()> {
    GroupedGemm {
        kind: GemmKind::Wgrad,
        a: Operand::plain(dy),
        b: Operand::plain(x),
        offsets: tokens.by_shard(),
        out: w.grad()?,
        accumulate: true,
    }
    .run(backend)
}
