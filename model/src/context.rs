//! What every layer of a model sees of a micro-batch.

use dropless_core::ops::Add;
use dropless_core::{Backend, DType, Memory, Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::moe::MoePolicy;
use crate::nn::{MlpPolicy, Policy, Tokens};
use crate::rope::Tables;

/// The tokens of one micro-batch on one rank, on the device.
#[derive(Debug)]
pub struct Inputs {
    /// Token ids, u32 `[tokens]`.
    pub ids: Tensor,
    /// Next tokens, u32 `[tokens]`; [`dropless_core::ops::NONE`] for no target.
    pub targets: Tensor,
    /// Position of each token in its document, u32 `[tokens]`.
    pub positions: Tensor,
    /// First key that each token sees, u32 `[tokens]`.
    pub start: Tensor,
    /// 1 / (tokens with a target in the whole step), f32 `[1]`.
    pub scale: Tensor,
    /// What the multi-token-prediction module needs, if there is one.
    pub next: Option<NextInputs>,
}

/// Inputs of the multi-token-prediction module.
#[derive(Debug)]
pub struct NextInputs {
    /// The next token (0 where there is none), u32 `[tokens]`.
    pub ids: Tensor,
    /// The one after it, or [`dropless_core::ops::NONE`].
    pub targets: Tensor,
    /// The loss coefficient / (tokens with such a target in the whole step), f32 `[1]`.
    pub scale: Tensor,
}

/// The policy for each class of saved activations between forward and backward: keep, offload, or recompute (activation
/// checkpointing). Does not affect results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Activations {
    /// The normalised input of attention.
    pub attention_input: Policy,
    /// Queries, keys and values.
    pub qkv: Policy,
    /// The result of attention before the output projection.
    pub attention_output: Policy,
    /// The normalised input of the MLP or the experts.
    pub mlp_input: Policy,
    /// The rows that the experts of this rank received.
    pub dispatched: Policy,
    /// Gate and up projections.
    pub gate_up: Policy,
    /// Input of the down projection.
    pub expert_hidden: Policy,
}

impl Activations {
    /// The same policy for every class.
    pub const fn all(policy: Policy) -> Activations {
        Activations {
            attention_input: policy,
            qkv: policy,
            attention_output: policy,
            mlp_input: policy,
            dispatched: policy,
            gate_up: policy,
            expert_hidden: policy,
        }
    }

    pub(crate) fn mlp(self) -> MlpPolicy {
        MlpPolicy { gate_up: self.gate_up, hidden: self.expert_hidden }
    }

    pub(crate) fn moe(self) -> MoePolicy {
        MoePolicy { dispatched: self.dispatched, experts: self.mlp(), shared: self.mlp() }
    }
}

/// One micro-batch on one rank as a layer sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context<'a> {
    pub(crate) backend: &'a dyn Backend,
    pub(crate) tokens: &'a Tokens,
    pub(crate) inputs: &'a Inputs,
    pub(crate) rope: &'a Tables,
    pub(crate) policy: Activations,
    /// Whether choices of experts count for balancing.
    pub(crate) counted: bool,
}

/// A device tensor of undefined contents.
pub(crate) fn alloc(backend: &dyn Backend, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    backend.alloc(dtype, shape, Memory::Device)
}

/// `a + b` in a new tensor like a.
pub(crate) fn sum(backend: &dyn Backend, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = alloc(backend, a.dtype(), a.shape())?;
    Add { a, b, c: None, out: &out }.run(backend)?;
    Ok(out)
}
