//! What training adds to the weights: gradients and the optimizer's moments.
//!
//! Gradients have one part for each gradient shard or, of experts, for each expert shard (NUMERICS.md, "Gradient shards
//! and ranks").

use dropless_core::ops::{Fill, TreeSum};
use dropless_core::{Backend, DType, Memory, Result, Tensor};

use crate::nn::Tokens;
use crate::params::{Arena, Kind, Params, Piece, Place, Spec};

/// AdamW's moments of a tensor, f32.
#[derive(Clone, Debug)]
pub struct Moments {
    /// First moment.
    pub m: Tensor,
    /// Second moment.
    pub v: Tensor,
}

/// The gradients of a step, the shards added: f32, as long as the arenas.
#[derive(Clone, Debug)]
pub struct GradientSums {
    /// Of the replicated parameters.
    pub replicated: Tensor,
    /// Of this rank's experts.
    pub experts: Tensor,
}

/// Gradients and moments of one arena.
#[derive(Debug)]
pub(crate) struct ArenaState {
    pub(crate) moments: Moments,
    /// Each parameter's parts one after the other; `parts * len` elements.
    grads: Tensor,
    /// Parts of a gradient.
    parts: usize,
}

/// Gradients and optimizer state of [`Params`].
#[derive(Debug)]
pub struct TrainState {
    pub(crate) replicated: ArenaState,
    pub(crate) experts: ArenaState,
}

impl ArenaState {
    fn new(backend: &dyn Backend, arena: &Arena, parts: usize) -> Result<ArenaState> {
        let zeros = |len| -> Result<Tensor> {
            let out = backend.alloc(DType::F32, &[len], Memory::Device)?;
            Fill { out: &out, value: 0.0 }.run(backend)?;
            Ok(out)
        };
        let moments = Moments { m: zeros(arena.len)?, v: zeros(arena.len)? };
        Ok(ArenaState { moments, grads: zeros(parts * arena.len)?, parts })
    }

    /// The gradient parts of a parameter, f32 `[parts, len]`.
    fn grad_parts(&self, spec: &Spec) -> Result<Tensor> {
        let (from, to) = (self.parts * spec.offset, self.parts * (spec.offset + spec.len()));
        self.grads.slice(from, to)?.reshape(&[self.parts, spec.len()])
    }
}

impl TrainState {
    /// Zeros for the parameters of a model whose micro-batches lie as `tokens` says.
    ///
    /// # Errors
    /// [`dropless_core::Error::Capacity`] when there is not enough memory.
    pub fn new(backend: &dyn Backend, params: &Params, tokens: &Tokens) -> Result<TrainState> {
        let (shards, expert_shards) = (tokens.shards(), tokens.expert_shards().count());
        Ok(TrainState {
            replicated: ArenaState::new(backend, &params.replicated, shards)?,
            experts: ArenaState::new(backend, &params.experts, expert_shards)?,
        })
    }

    /// Bytes of the moments, and of the gradients.
    pub fn bytes(&self) -> (u64, u64) {
        let sum = |of: fn(&ArenaState) -> usize| (of(&self.replicated) + of(&self.experts)) as u64;
        (sum(|state| state.moments.m.bytes() + state.moments.v.bytes()), sum(|state| state.grads.bytes()))
    }

    fn arena(&self, kind: Kind) -> &ArenaState {
        if kind == Kind::Expert { &self.experts } else { &self.replicated }
    }

    /// Where a parameter's gradient goes.
    pub(crate) fn grad(&self, spec: &Spec) -> Result<Tensor> {
        let state = self.arena(spec.kind);
        let first = if spec.kind == Kind::Expert { vec![state.parts, spec.groups] } else { vec![state.parts] };
        state.grad_parts(spec)?.reshape(&[&first, &spec.shape[..]].concat())
    }

    /// The optimizer state of a piece; None for what the optimizer does not touch.
    ///
    /// # Errors
    /// None in practice: every piece lies inside its arena.
    pub fn moments(&self, piece: &Piece) -> Result<Option<Moments>> {
        let Place { kind, from, to } = piece.place;
        if kind == Kind::Bias {
            return Ok(None);
        }
        let Moments { m, v } = &self.arena(kind).moments;
        Ok(Some(Moments { m: m.slice(from, to)?, v: v.slice(from, to)? }))
    }

    /// Sets every gradient to zero.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn clear_gradients(&self, backend: &dyn Backend) -> Result<()> {
        for state in [&self.replicated, &self.experts] {
            Fill { out: &state.grads, value: 0.0 }.run(backend)?;
        }
        Ok(())
    }

    /// The gradients of this rank: each parameter's shards added along their tree.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn reduce_shards(&self, backend: &dyn Backend, params: &Params) -> Result<GradientSums> {
        let reduce = |arena: &Arena, state: &ArenaState, experts: bool| -> Result<Tensor> {
            if state.parts == 1 {
                return Ok(state.grads.clone());
            }
            let sum = backend.alloc(DType::F32, &[arena.len], Memory::Device)?;
            Fill { out: &sum, value: 0.0 }.run(backend)?;
            for spec in params.specs.iter().filter(|s| s.kind != Kind::Bias && (s.kind == Kind::Expert) == experts) {
                let out = sum.slice(spec.offset, spec.offset + spec.len())?;
                TreeSum { parts: &state.grad_parts(spec)?, out: &out }.run(backend)?;
            }
            Ok(sum)
        };
        Ok(GradientSums {
            replicated: reduce(&params.replicated, &self.replicated, false)?,
            experts: reduce(&params.experts, &self.experts, true)?,
        })
    }
}

impl GradientSums {
    fn of(&self, kind: Kind) -> &Tensor {
        if kind == Kind::Expert { &self.experts } else { &self.replicated }
    }

    /// The gradient of every piece that has one, by name.
    ///
    /// # Errors
    /// None in practice: every piece lies inside its arena.
    pub fn by_name(&self, params: &Params) -> Result<Vec<(String, Tensor)>> {
        let pieces = params.pieces()?.into_iter().filter(|piece| piece.place.kind != Kind::Bias);
        pieces
            .map(|piece| {
                let Place { kind, from, to } = piece.place;
                Ok((piece.name, self.of(kind).slice(from, to)?))
            })
            .collect()
    }

    /// The gradients of the local experts of each expert parameter, f32 `[local experts, rows, columns]`, in order.
    pub(crate) fn of_experts(&self, params: &Params) -> Result<Vec<Tensor>> {
        let experts = params.specs.iter().filter(|s| s.kind == Kind::Expert);
        let shape = |s: &Spec| [s.groups, s.shape[0], s.shape[1]];
        experts.map(|s| self.experts.slice(s.offset, s.offset + s.len())?.reshape(&shape(s))).collect()
    }
}
