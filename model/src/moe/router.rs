//! The router: logits, scores, choice, and their gradients. All in f32. NUMERICS.md, "Routing".

use crate::nn::{Tokens, Weight};
use dropless_core::Backend;
use dropless_core::ops::{Balance, GemmKind, GroupedGemm, Operand, Route, Score, TopK, TopKGrad};
use dropless_core::{DType, Memory, Tensor};
use dropless_core::{Error, Result};

/// Chooses `top_k` experts for each token.
#[derive(Clone, Debug)]
pub struct Router {
    /// f32 `[1, experts, h]`.
    pub weight: Weight,
    /// f32 `[experts]`: added to the scores for selection only (auxiliary-loss-free balancing).
    pub bias: Option<Tensor>,
    /// Score function.
    pub score: Score,
    /// Experts per token.
    pub top_k: usize,
    /// Expert groups; 1 for none.
    pub groups: usize,
    /// Groups that a token may choose from.
    pub top_groups: usize,
    /// Whether the weights are divided by their sum.
    pub normalize: bool,
    /// Scaling factor of the weights.
    pub scale: f32,
    /// Coefficient of the auxiliary loss of one sequence (already divided by the sequences of the step); 0 for none.
    pub balance: f32,
}

impl Router {
    /// Softmax or sigmoid scores, the `top_k` best, weights that sum to 1; no groups, bias or auxiliary loss.
    ///
    /// # Shape
    /// weight: f32 `[1, experts, h]`.
    pub fn new(weight: Weight, score: Score, top_k: usize) -> Router {
        let (bias, groups, top_groups, normalize, scale, balance) = (None, 1, 1, true, 1.0, 0.0);
        Router { weight, bias, score, top_k, groups, top_groups, normalize, scale, balance }
    }
}

/// What the backward pass of a [`Router`] needs; never dropped or recomputed.
#[derive(Debug, Default)]
pub struct RouterSaved {
    state: Option<State>,
}

#[derive(Debug)]
struct State {
    scores: Tensor,
    ids: Tensor,
    weights: Tensor,
    balance: Option<(Tensor, Tensor)>,
}

impl RouterSaved {
    fn state(&self) -> Result<&State> {
        self.state.as_ref().ok_or_else(|| Error::Argument {
            op: "router",
            field: "saved",
            expected: "the state of a forward pass".into(),
            found: "nothing".into(),
        })
    }

    pub(super) fn choice(&self) -> Result<(&Tensor, &Tensor)> {
        self.state().map(|s| (&s.ids, &s.weights))
    }

    pub(super) fn balance_loss(&self) -> Option<&Tensor> {
        self.state.as_ref().and_then(|s| s.balance.as_ref()).map(|(_, loss)| loss)
    }
}

/// A factor of the router's products beside activations of a type: with bf16 ones f32 goes in bf16 parts, to the f32
/// result at the speed of bf16.
fn factor(values: &Tensor, activations: DType) -> Operand<'_> {
    match (values.dtype(), activations) {
        (DType::F32, DType::Bf16) => Operand::Split { values },
        _ => Operand::plain(values),
    }
}

impl Router {
    /// Number of experts on all ranks.
    pub fn experts(&self) -> usize {
        self.weight.value.shape()[1]
    }

    pub(super) fn forward(
        &self,
        backend: &dyn Backend,
        tokens: &Tokens,
        x: &Tensor,
        valid: Option<&Tensor>,
        counts: &Tensor,
        saved: &mut RouterSaved,
    ) -> Result<()> {
        let (t, e) = (tokens.count(), self.experts());
        let alloc = |dtype, shape: &[usize]| backend.alloc(dtype, shape, Memory::Device);
        let logits = alloc(DType::F32, &[t, e])?;
        GroupedGemm {
            kind: GemmKind::Forward,
            a: Operand::plain(x),
            b: factor(&self.weight.value, x.dtype()),
            offsets: tokens.whole(),
            out: &logits,
            accumulate: false,
        }
        .run(backend)?;
        let balance = if self.balance == 0.0 {
            None
        } else {
            let sequences = tokens.sequences();
            Some((alloc(DType::U32, &[sequences, e])?, alloc(DType::F32, &[sequences])?))
        };
        let state = State {
            scores: alloc(DType::F32, &[t, e])?,
            ids: alloc(DType::U32, &[t, self.top_k])?,
            weights: alloc(DType::F32, &[t, self.top_k])?,
            balance,
        };
        Route::TopK(TopK {
            logits: &logits,
            bias: self.bias.as_ref(),
            valid,
            score: self.score,
            groups: self.groups,
            top_groups: self.top_groups,
            normalize: self.normalize,
            scale: self.scale,
            scores: &state.scores,
            ids: &state.ids,
            weights: &state.weights,
            counts,
            balance: self.balance_of(tokens, &state),
        })
        .run(backend)?;
        saved.state = Some(state);
        Ok(())
    }

    fn balance_of<'a>(&self, tokens: &Tokens, state: &'a State) -> Option<Balance<'a>> {
        state.balance.as_ref().map(|(counts, loss)| Balance {
            coefficient: self.balance,
            sequence: tokens.sequence(),
            counts,
            loss,
        })
    }

    /// The f32 gradient of x; adds to the weight's gradient.
    pub(super) fn backward(
        &self,
        backend: &dyn Backend,
        tokens: &Tokens,
        x: &Tensor,
        d_weights: &Tensor,
        saved: &RouterSaved,
    ) -> Result<Tensor> {
        let state = saved.state()?;
        let d_logits = backend.alloc(DType::F32, state.scores.shape(), Memory::Device)?;
        Route::TopKGrad(TopKGrad {
            scores: &state.scores,
            ids: &state.ids,
            d_weights,
            score: self.score,
            normalize: self.normalize,
            scale: self.scale,
            balance: self.balance_of(tokens, state),
            d_logits: &d_logits,
        })
        .run(backend)?;
        GroupedGemm {
            kind: GemmKind::Wgrad,
            a: factor(&d_logits, x.dtype()),
            b: Operand::plain(x),
            offsets: tokens.by_shard(),
            out: self.weight.grad()?,
            accumulate: true,
        }
        .run(backend)?;
        let d_x = backend.alloc(DType::F32, x.shape(), Memory::Device)?;
        GroupedGemm {
            kind: GemmKind::Dgrad,
            a: factor(&d_logits, x.dtype()),
            b: factor(&self.weight.value, x.dtype()),
            offsets: tokens.whole(),
            out: &d_x,
            accumulate: false,
        }
        .run(backend)?;
        Ok(d_x)
    }
}
