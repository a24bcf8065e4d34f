//! Linear layers `y = x w^T` over all tokens of a rank, without bias.

use super::Tokens;
use crate::backend::Backend;
use crate::error::Result;
use crate::ops::{GemmKind, GroupedGemm, Operand};
use crate::tensor::{DType, Memory, Tensor};

/// A weight and where its gradient goes.
#[derive(Clone, Debug)]
pub struct Weight {
    /// `[1, n, k]` in the type of the activations it meets (experts: `[local experts, n, k]`).
    pub value: Tensor,
    /// f32 `[shards, n, k]`, added to (experts: `[expert shards, local experts, n, k]`).
    pub grad: Tensor,
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
/// As [`forward`].
pub fn wgrad(backend: &dyn Backend, tokens: &Tokens, dy: &Tensor, x: &Tensor, w: &Weight) -> Result<()> {
    GroupedGemm {
        kind: GemmKind::Wgrad,
        a: Operand::plain(dy),
        b: Operand::plain(x),
        offsets: tokens.by_shard(),
        out: &w.grad,
        accumulate: true,
    }
    .run(backend)
}
