//! The Mixture-of-Experts layer, forward and backward over any backend. NUMERICS.md, "Mixture-of-Experts layer".
//!
//! `router` scores the tokens and chooses experts; `dispatch` brings each token to the ranks of its experts, once per
//! rank, sorted by expert; `experts` runs the grouped products under a precision recipe. This file puts them together:
//!
//! ```text
//! x ─ router ─ ids, weights ─ dispatch ─ experts (SwiGLU times weight) ─ tree over local experts ─ return
//!   └ shared expert ───────────────────────────────────────────────────── tree over ranks ─ + shared + residual
//! ```
//!
//! No token is ever dropped: the buffers hold the worst case, in which every choice of every token falls on one rank.
//!
//! # Memory
//! With R ranks, T tokens a rank and chunk, K choices, L local experts, H hidden, I expert width and b bytes of an
//! element, a chunk needs at most S = R T min(K, L) slots, and
//! `R T H (2 b + 8) + S (2 H b + 5 I b + 12)` bytes on a rank in the backward pass ([`Moe::chunk_bytes`]).
//! Not counted: gathered rows and codes that a quantized recipe holds during a product, and, with several chunks, the
//! `S H b` bytes of each chunk's input gradient, which wait for the router's.

mod dispatch;
mod experts;
mod router;

pub use experts::{ExpertWeights, Recipe};
pub use router::{Router, RouterSaved};

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::nn::{Mlp, MlpPolicy, MlpSaved, Policy, Saved, Tokens, Weight};
use crate::ops::Window;
use crate::tensor::{DType, Memory, Tensor};

use dispatch::{Dispatch, Route};
use experts::Slots;

/// A Mixture-of-Experts layer on one rank.
#[derive(Clone, Debug)]
pub struct Moe {
    /// Scores and choice.
    pub router: Router,
    /// Gate and up of the local experts, `[local experts, 2 * i, h]`.
    pub gate_up: Weight,
    /// Down of the local experts, `[local experts, h, i]`.
    pub down: Weight,
    /// Arithmetic of the expert products.
    pub recipe: Recipe,
    /// The expert that every token sees.
    pub shared: Option<Mlp>,
    /// Number of pieces in which the layer walks its tokens. A piece of every gradient shard at a time, so that the bits
    /// do not depend on the ranks (but on this number).
    pub chunks: usize,
}

/// What becomes of a layer's activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoePolicy {
    /// The received rows (with one rank and one chunk there are none: they are the layer's input).
    pub dispatched: Policy,
    /// The experts' activations.
    pub experts: MlpPolicy,
    /// The shared expert's activations.
    pub shared: MlpPolicy,
}

/// What the backward pass of a [`Moe`] needs. The routing is always kept: computing it again could choose otherwise.
#[derive(Debug, Default)]
pub struct MoeSaved {
    router: RouterSaved,
    shared: MlpSaved,
    chunks: Vec<ChunkSaved>,
}

#[derive(Debug)]
struct ChunkSaved {
    route: Route,
    rows: Saved,
    experts: MlpSaved,
}

/// Quantized forms of a layer's expert weights, made once for each optimizer step.
#[derive(Clone, Debug)]
pub struct MoeExperts {
    gate_up: ExpertWeights,
    down: ExpertWeights,
}

impl Moe {
    /// Brings the expert weights into the form of the recipe's products.
    ///
    /// # Errors
    /// Those of the quantization.
    pub fn prepare(&self, backend: &dyn Backend) -> Result<MoeExperts> {
        Ok(MoeExperts {
            gate_up: ExpertWeights::prepare(backend, self.recipe, &self.gate_up.value)?,
            down: ExpertWeights::prepare(backend, self.recipe, &self.down.value)?,
        })
    }

    /// Bytes that one chunk of `tokens` tokens a rank needs in the worst case (see the module for what counts).
    pub fn chunk_bytes(&self, ranks: usize, tokens: usize, element: DType) -> u64 {
        let [local, h, i] = [0, 1, 2].map(|d| self.down.value.shape()[d] as u64);
        let rows = (ranks * tokens) as u64;
        let slots = rows * (self.router.top_k as u64).min(local);
        let b = element.size() as u64;
        rows * h * (2 * b + 8) + slots * (2 * h * b + 5 * i * b + 12)
    }

    /// Fails before anything is computed when a chunk does not fit.
    ///
    /// # Errors
    /// [`Error::Capacity`] with the rows and bytes of the worst case.
    pub fn check_budget(&self, backend: &dyn Backend, tokens: &Tokens, element: DType, budget: u64) -> Result<()> {
        let ranks = backend.caps().ranks;
        let chunk = tokens.capacity().div_ceil(self.chunks);
        let needed = self.chunk_bytes(ranks, chunk, element);
        if needed <= budget {
            return Ok(());
        }
        let rows = ranks * chunk * self.router.top_k.min(self.down.value.shape()[0]);
        Err(Error::Capacity {
            op: "moe",
            needed,
            available: budget,
            hint: format!("the worst case is {rows} expert rows on a rank; use more than {} chunks", self.chunks),
        })
    }

    /// The pieces of the layer's tokens; None for all of them at once.
    fn windows(&self, tokens: &Tokens) -> Vec<Option<Window>> {
        if self.chunks <= 1 {
            return vec![None];
        }
        let period = tokens.count() / tokens.shards();
        let edge = |c: usize| period * c / self.chunks;
        (0..self.chunks).map(|c| Some(Window { period, from: edge(c), to: edge(c + 1) })).collect()
    }

    /// `experts(x) + shared(x) + residual`, rounded once.
    ///
    /// # Shape
    /// x, residual, result: `[tokens, h]`; valid: u32 `[tokens]`, 0 for padding; counts: u32 `[experts]`, to which the
    /// choices of each expert are added.
    ///
    /// # Errors
    /// Those of the ops.
    #[expect(clippy::too_many_arguments, reason = "a layer has that many inputs; a struct would only rename them")]
    pub fn forward(
        &self,
        backend: &dyn Backend,
        tokens: &Tokens,
        experts: &MoeExperts,
        x: &Tensor,
        valid: Option<&Tensor>,
        residual: &Tensor,
        counts: &Tensor,
        policy: MoePolicy,
        saved: &mut MoeSaved,
    ) -> Result<Tensor> {
        self.router.forward(backend, tokens, x, valid, counts, &mut saved.router)?;
        let shared = match &self.shared {
            Some(mlp) => Some(mlp.forward(backend, tokens, x, policy.shared, &mut saved.shared)?),
            None => None,
        };
        let out = backend.alloc(x.dtype(), x.shape(), Memory::Device)?;
        let (ids, weights) = saved.router.choice()?;
        let local = self.down.value.shape()[0];
        for window in self.windows(tokens) {
            let dispatch = Dispatch::new(backend, self.router.experts(), local, window);
            let route = dispatch.route(tokens, ids, weights)?;
            let mut chunk = ChunkSaved { route, rows: Saved::default(), experts: MlpSaved::default() };
            let rows = received(&dispatch, x, &mut chunk)?;
            let slots = Slots { backend, moe: self, experts, rows: &rows, route: &chunk.route };
            let y = slots.forward(&mut chunk.experts)?;
            dispatch.combine(&chunk.route, &y, [shared.as_ref(), Some(residual)], &out)?;
            chunk.rows.settle(backend, if chunk.route.exchanges() { policy.dispatched } else { Policy::Recompute })?;
            chunk.experts.gate_up.settle(backend, policy.experts.gate_up)?;
            chunk.experts.hidden.settle(backend, policy.experts.hidden)?;
            saved.chunks.push(chunk);
        }
        Ok(out)
    }

    /// The gradient of x for the gradient `dy` of the result; adds to the weights' gradients. The residual's gradient is
    /// `dy` itself.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn backward(
        &self,
        backend: &dyn Backend,
        tokens: &Tokens,
        experts: &MoeExperts,
        x: &Tensor,
        dy: &Tensor,
        mut saved: MoeSaved,
    ) -> Result<Tensor> {
        let d_shared = match &self.shared {
            Some(mlp) => Some(mlp.backward(backend, tokens, x, dy, std::mem::take(&mut saved.shared))?),
            None => None,
        };
        let local = self.down.value.shape()[0];
        let d_weights = backend.alloc(DType::F32, &[tokens.count(), self.router.top_k], Memory::Device)?;
        // The neutral element of addition: -0 + x is x for every x, +0 included.
        crate::ops::Fill { out: &d_weights, value: -0.0 }.run(backend)?;
        let mut partial = Vec::new();
        for (window, mut chunk) in self.windows(tokens).into_iter().zip(std::mem::take(&mut saved.chunks)) {
            let dispatch = Dispatch::new(backend, self.router.experts(), local, window);
            let rows = received(&dispatch, x, &mut chunk)?;
            let dy_rows = dispatch.rows(&chunk.route, dy)?;
            let slots = Slots { backend, moe: self, experts, rows: &rows, route: &chunk.route };
            let grad = slots.backward(&dy_rows, chunk.experts)?;
            dispatch.return_weights(&chunk.route, &grad.d_weight, &d_weights)?;
            partial.push((window, chunk.route, grad.d_rows));
        }
        let d_router = self.router.backward(backend, tokens, x, &d_weights, &saved.router)?;
        let dx = backend.alloc(x.dtype(), x.shape(), Memory::Device)?;
        for (window, route, d_rows) in partial {
            let dispatch = Dispatch::new(backend, self.router.experts(), local, window);
            dispatch.combine(&route, &d_rows, [d_shared.as_ref(), Some(&d_router)], &dx)?;
        }
        Ok(dx)
    }
}

/// The rows this rank's experts work on.
fn received(dispatch: &Dispatch<'_>, x: &Tensor, chunk: &mut ChunkSaved) -> Result<Tensor> {
    if let Some(rows) = chunk.rows.load(dispatch.backend())? {
        return Ok(rows);
    }
    let rows = dispatch.rows(&chunk.route, x)?;
    Ok(chunk.rows.set(rows))
}

impl MoeSaved {
    /// The chosen experts of each token (u32 `[tokens, k]`, [`crate::ops::NONE`] for padding) and their weights (f32), after a
    /// forward pass.
    ///
    /// # Errors
    /// [`Error::Argument`] before the forward pass.
    pub fn choice(&self) -> Result<(&Tensor, &Tensor)> {
        self.router.choice()
    }

    /// The auxiliary loss of each sequence, if there is one.
    pub fn balance_loss(&self) -> Option<&Tensor> {
        self.router.balance_loss()
    }
}
