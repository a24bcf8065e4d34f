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
//! The layer processes its tokens in pieces: one expert shard after the other, since each is a chain of its own in the
//! weight gradients, and within a shard one chunk after the other, if memory requires it.
//!
//! No token is ever dropped: the buffers hold the worst case, in which every choice of every token falls on one rank.
//!
//! # Memory
//! With R ranks that share the experts, T tokens per rank and piece, K choices, L local experts, H hidden, I expert
//! width and b bytes per element, a piece has at most n = R T rows and S = n min(K, L) slots. While a rank works on one
//! of its P pieces it holds, in the backward pass, which needs the most ([`Moe::working_bytes`]):
//!
//! - of the piece, `n H (2 b + 8)` bytes for rows that travel (none with one rank and one chunk) and `S (6 I b + 12)` for
//!   what the experts compute; under a quantized recipe also the codes of the gradient and input rows, of the hidden
//!   values and of the gradient of gate and up, with a byte of scales for 32 of them;
//! - of every piece, its dispatch plan, `n (8 K + 8) + 8 S`, and the gradient of its input, `S H b`, which waits for
//!   the router's;
//! - of each token of the layer, `H (2 b + 4) + 8 E + 8 K` for the results and the router of E experts.
//!
//! Not counted are the shared expert, and activations that the policy keeps for the backward pass.

mod dispatch;
mod experts;
mod router;

pub use experts::Recipe;
pub use router::{Router, RouterSaved};

use std::ops::Range;

use crate::nn::quantized::WeightOperands;
use crate::nn::{Mlp, MlpPolicy, MlpSaved, Policy, Saved, Tokens, Weight};
use dropless_core::ops::Window;
use dropless_core::{Backend, Group};
use dropless_core::{DType, Memory, Tensor};
use dropless_core::{Error, Result};

use dispatch::{Dispatch, Placement};
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
    /// The shared expert, which every token visits, under a recipe of its own: see [`Mlp::prepare`].
    pub shared: Option<Mlp>,
    /// Number of pieces in which the layer processes its tokens, a piece of every gradient shard at a time, so that
    /// results depend on this number but not on the ranks.
    pub chunks: usize,
}

/// What is done with a layer's activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoePolicy {
    /// The received rows (with one rank and one chunk there are none: they are the layer's input).
    pub dispatched: Policy,
    /// The experts' activations.
    pub experts: MlpPolicy,
    /// The shared expert's activations.
    pub shared: MlpPolicy,
}

/// What the backward pass of a [`Moe`] needs. The routing is always kept: recomputed, it could choose differently.
#[derive(Debug, Default)]
pub struct MoeSaved {
    router: RouterSaved,
    shared: MlpSaved,
    chunks: Vec<ChunkSaved>,
}

/// A part of a layer's tokens that is dispatched at once.
struct Piece<'a> {
    expert_shard: usize,
    /// The tokens of the expert shard on this rank.
    range: Range<usize>,
    tokens: &'a Tokens,
    /// Which of them; all if None.
    window: Option<Window>,
}

impl Piece<'_> {
    /// The expert shard's rows of a value of all tokens.
    fn of(&self, x: &Tensor) -> Result<Tensor> {
        x.slice(self.range.start, self.range.end)
    }
}

#[derive(Debug)]
struct ChunkSaved {
    placement: Placement,
    rows: Saved,
    experts: MlpSaved,
}

/// Quantized forms of a layer's expert weights, made once for each optimizer step.
#[derive(Clone, Debug)]
pub struct MoeExperts {
    gate_up: WeightOperands,
    down: WeightOperands,
}

impl Moe {
    /// A layer without a shared expert that processes its tokens in one piece.
    ///
    /// # Shape
    /// See the fields.
    pub fn new(router: Router, gate_up: Weight, down: Weight, recipe: Recipe) -> Moe {
        Moe { router, gate_up, down, recipe, shared: None, chunks: 1 }
    }

    /// Brings the expert weights into the form of the recipe's products.
    ///
    /// # Errors
    /// Those of the quantization.
    pub fn prepare(&self, backend: &dyn Backend) -> Result<MoeExperts> {
        Ok(MoeExperts {
            gate_up: WeightOperands::prepare(backend, self.recipe.format(), &self.gate_up.value)?,
            down: WeightOperands::prepare(backend, self.recipe.format(), &self.down.value)?,
        })
    }

    /// Rows that one piece has on a rank in the worst case.
    fn piece_rows(&self, ranks: usize, tokens: &Tokens) -> usize {
        let fullest = tokens.expert_shards().map(|(_, shard)| shard.capacity()).max().unwrap_or(0);
        ranks * fullest.div_ceil(self.chunks)
    }

    /// Slots of so many rows.
    fn slots(&self, rows: usize) -> usize {
        rows * self.router.top_k.min(self.down.value.shape()[0])
    }

    /// Worst case of the bytes that a rank needs for the layer's work when `ranks` ranks share the experts: see the
    /// module for what counts.
    pub fn working_bytes(&self, ranks: usize, tokens: &Tokens) -> u64 {
        let [local, h, i] = [0, 1, 2].map(|d| self.down.value.shape()[d]);
        let (k, experts, b) = (self.router.top_k, self.router.experts(), self.recipe.element().size());
        let (rows, pieces) = (self.piece_rows(ranks, tokens), tokens.expert_shards().count() * self.chunks);
        let slots = self.slots(rows);
        let travelling = if ranks > 1 || self.chunks > 1 { rows * h * (2 * b + 8) } else { 0 };
        let computed = slots * (6 * i * b + 12) + self.recipe.code_bytes(rows, slots, local, h, i);
        let waiting = rows * (8 * k + 8) + slots * (8 + h * b);
        let results = tokens.count() * (h * (2 * b + 4) + 8 * experts + 8 * k);
        (travelling + computed + pieces * waiting + results) as u64
    }

    /// Fails, before anything is computed, when a piece does not fit in memory.
    ///
    /// # Errors
    /// [`Error::Capacity`] with the rows and bytes of the worst case.
    pub fn check_budget(&self, backend: &dyn Backend, tokens: &Tokens, budget: u64) -> Result<()> {
        let ranks = backend.caps().size(Group::Experts);
        let needed = self.working_bytes(ranks, tokens);
        if needed <= budget {
            return Ok(());
        }
        let rows = self.slots(self.piece_rows(ranks, tokens));
        Err(Error::Capacity {
            op: "moe",
            needed,
            available: budget,
            hint: format!("the worst case is {rows} expert rows on a rank; use more than {} chunks", self.chunks),
        })
    }

    /// The pieces in which the layer walks its tokens.
    fn pieces<'a>(&self, tokens: &'a Tokens) -> Vec<Piece<'a>> {
        let mut pieces = Vec::new();
        for (expert_shard, (range, tokens)) in tokens.expert_shards().enumerate() {
            let (period, chunks) = (tokens.period(), self.chunks.max(1));
            let edge = |c: usize| period * c / chunks;
            for c in 0..chunks {
                let window = (chunks > 1).then(|| Window { period, from: edge(c), to: edge(c + 1) });
                pieces.push(Piece { expert_shard, range: range.clone(), tokens, window });
            }
        }
        pieces
    }

    fn dispatch<'a>(&self, backend: &'a dyn Backend, piece: &Piece<'_>) -> Dispatch<'a> {
        Dispatch::new(backend, self.router.experts(), self.down.value.shape()[0], piece.window)
    }

    /// `experts(x) + shared(x) + residual`, rounded once; without a residual, `experts(x) + shared(x)`.
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
        residual: Option<&Tensor>,
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
        for piece in self.pieces(tokens) {
            let dispatch = self.dispatch(backend, &piece);
            let placement = dispatch.place(piece.tokens, &piece.of(ids)?, &piece.of(weights)?)?;
            let mut chunk = ChunkSaved { placement, rows: Saved::default(), experts: MlpSaved::default() };
            let rows = received(&dispatch, &piece.of(x)?, &mut chunk)?;
            let (placement, expert_shard) = (&chunk.placement, piece.expert_shard);
            let y = Slots { backend, moe: self, experts, rows: &rows, placement, expert_shard }
                .forward(&mut chunk.experts)?;
            let part = |y: Option<&Tensor>| y.map(|y| piece.of(y)).transpose();
            let (shared, residual) = (part(shared.as_ref())?, part(residual)?);
            dispatch.combine(placement, &y, [shared.as_ref(), residual.as_ref()], &piece.of(&out)?)?;
            chunk
                .rows
                .settle(backend, if chunk.placement.travels() { policy.dispatched } else { Policy::Recompute })?;
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
        let d_weights = backend.alloc(DType::F32, &[tokens.count(), self.router.top_k], Memory::Device)?;
        // The neutral element of addition: -0 + x is x for every x, +0 included.
        dropless_core::ops::Fill { out: &d_weights, value: -0.0 }.run(backend)?;
        let mut partial = Vec::new();
        for (piece, mut chunk) in self.pieces(tokens).into_iter().zip(std::mem::take(&mut saved.chunks)) {
            let dispatch = self.dispatch(backend, &piece);
            let rows = received(&dispatch, &piece.of(x)?, &mut chunk)?;
            let (placement, expert_shard) = (&chunk.placement, piece.expert_shard);
            let dy_rows = dispatch.rows(placement, &piece.of(dy)?)?;
            let slots = Slots { backend, moe: self, experts, rows: &rows, placement, expert_shard };
            let grad = slots.backward(&dy_rows, chunk.experts)?;
            dispatch.return_weights(placement, &grad.d_weight, &piece.of(&d_weights)?)?;
            partial.push((piece, chunk.placement, grad.d_rows));
        }
        let d_router = self.router.backward(backend, tokens, x, &d_weights, &saved.router)?;
        let dx = backend.alloc(x.dtype(), x.shape(), Memory::Device)?;
        for (piece, placement, d_rows) in partial {
            let d_shared = d_shared.as_ref().map(|d| piece.of(d)).transpose()?;
            let add = [d_shared.as_ref(), Some(&piece.of(&d_router)?)];
            self.dispatch(backend, &piece).combine(&placement, &d_rows, add, &piece.of(&dx)?)?;
        }
        Ok(dx)
    }
}

/// The rows this rank's experts work on.
fn received(dispatch: &Dispatch<'_>, x: &Tensor, chunk: &mut ChunkSaved) -> Result<Tensor> {
    if let Some(rows) = chunk.rows.load(dispatch.backend())? {
        return Ok(rows);
    }
    let rows = dispatch.rows(&chunk.placement, x)?;
    Ok(chunk.rows.set(rows))
}

impl MoeSaved {
    /// The chosen experts of each token (u32 `[tokens, k]`, [`dropless_core::ops::NONE`] for padding) and their weights
    /// (f32), after a forward pass.
    ///
    /// # Errors
    /// [`Error::Argument`] before the forward pass.
    pub fn choice(&self) -> Result<(&Tensor, &Tensor)> {
        self.router.choice()
    }

    /// See [`Saved::prefetch`].
    ///
    /// # Errors
    /// A failure of the device.
    pub fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        self.shared.prefetch(backend)?;
        for chunk in &mut self.chunks {
            chunk.rows.prefetch(backend)?;
            chunk.experts.prefetch(backend)?;
        }
        Ok(())
    }

    /// The auxiliary loss of each sequence, if there is one.
    pub fn balance_loss(&self) -> Option<&Tensor> {
        self.router.balance_loss()
    }
}
