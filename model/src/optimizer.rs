//! From the gradients of all ranks to new weights. NUMERICS.md, "Optimizer" and "Gradient shards and ranks".

use dropless_core::ops::{AdamW, AllToAll, BiasUpdate, ClipScale, GatherRows, SumRows, SumSquares, TreeSum};
use dropless_core::{Backend, DType, Error, Group, Memory, Result, Tensor};

use crate::collective::gather;
use crate::params::{Arena, ROW};
use crate::train_state::ArenaState;
use crate::{GradientSums, Model, TrainState, single};

/// The numbers of AdamW (arXiv 1711.05101) that do not change during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Epsilon, added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Step of the selection biases; 0 for none.
    pub bias_update_rate: f64,
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepNumbers {
    /// Learning rate.
    pub learning_rate: f32,
    /// `1 - beta1^step` and `1 - beta2^step`.
    pub bias_corrections: [f32; 2],
}

/// The gradients of a step and their norm: of the replicated parameters the same on every rank, of the experts on every
/// rank that holds them.
#[derive(Debug)]
pub struct Gradients {
    /// The sums over all shards.
    pub sums: GradientSums,
    /// Norm and clipping factor, f32 `[2]`.
    pub clip: Tensor,
}

fn state(model: &Model) -> Result<&TrainState> {
    model.state.as_ref().ok_or_else(|| Error::Argument {
        op: "optimizer",
        field: "model",
        expected: "a model that is trained".into(),
        found: "one without gradients".into(),
    })
}

/// Adds the shards of all ranks and computes the global norm, which is clipped to `max_norm` (0 for no clipping).
///
/// # Errors
/// Those of the ops and of the ranks; [`Error::Argument`] of a model that is not trained.
pub fn reduce(backend: &dyn Backend, model: &Model, max_norm: f64) -> Result<Gradients> {
    let GradientSums { replicated, experts } = state(model)?.reduce_shards(backend, &model.params)?;
    let sums = GradientSums {
        replicated: reduce_ranks(backend, Group::World, replicated)?,
        experts: reduce_ranks(backend, Group::Replicas, experts)?,
    };
    let squares = squares(backend, model, &sums)?;
    let clip = backend.alloc(DType::F32, &[2], Memory::Device)?;
    ClipScale { squares: &squares, max_norm: single(max_norm), out: &clip }.run(backend)?;
    Ok(Gradients { sums, clip })
}

/// Each rank of the group adds one piece of all members' sums along the tree over them, then everyone gets every piece.
fn reduce_ranks(backend: &dyn Backend, group: Group, sum: Tensor) -> Result<Tensor> {
    let ranks = backend.caps().size(group);
    if ranks == 1 {
        return Ok(sum);
    }
    let piece = sum.len() / ranks;
    let parts = backend.alloc(DType::F32, &[ranks, piece], Memory::Device)?;
    AllToAll { group, send: &sum.reshape(&[ranks, piece])?, recv: &parts, counts: None }.run_in_order(backend)?;
    let mine = backend.alloc(DType::F32, &[piece], Memory::Device)?;
    TreeSum { parts: &parts, out: &mine }.run(backend)?;
    gather(backend, group, &mine)?.reshape(&[ranks * piece])
}

/// Sums of squares in the one order that does not depend on the ranks: all replicated gradients, then each expert of
/// each expert parameter.
fn squares(backend: &dyn Backend, model: &Model, sums: &GradientSums) -> Result<Tensor> {
    let alloc = |shape: &[usize]| backend.alloc(DType::F32, shape, Memory::Device);
    let experts = sums.of_experts(&model.params)?;
    let ranks = backend.caps().size(Group::Experts);
    let local: usize = experts.first().map_or(0, |g| g.shape()[0]);
    let squares = alloc(&[1 + experts.len() * ranks * local, 1])?;

    let rows = sums.replicated.reshape(&[sums.replicated.len() / ROW, ROW])?;
    let by_row = alloc(&[rows.rows(), 1])?;
    SumSquares { x: &rows, out: &by_row }.run(backend)?;
    SumRows { x: &by_row, out: &squares.slice(0, 1)? }.run(backend)?;
    if experts.is_empty() {
        return Ok(squares);
    }

    let mine = alloc(&[experts.len() * local, 1])?;
    for (p, grad) in experts.iter().enumerate() {
        let by_row = alloc(&[grad.rows(), 1])?;
        SumSquares { x: grad, out: &by_row }.run(backend)?;
        SumRows { x: &by_row, out: &mine.slice(p * local, (p + 1) * local)? }.run(backend)?;
    }
    // From (rank, parameter, local expert) to (parameter, global expert).
    let all = gather(backend, Group::Experts, &mine)?.reshape(&[ranks * experts.len() * local, 1])?;
    let order: Vec<u32> = (0..experts.len())
        .flat_map(|p| (0..ranks).flat_map(move |r| (0..local).map(move |l| (r, p, l))))
        .map(|(r, p, l)| u32::try_from((r * experts.len() + p) * local + l))
        .collect::<std::result::Result<_, _>>()
        .expect("fewer experts than 2^32");
    let index = backend.upload(DType::U32, &[order.len()], &order)?;
    GatherRows { x: &all, index: &index, out: &squares.slice(1, squares.rows())? }.run(backend)?;
    Ok(squares)
}

/// One step of AdamW on every parameter, and of the selection biases.
///
/// `counts` holds all ranks' expert counts of each MoE layer.
///
/// # Errors
/// Those of the ops; [`Error::Argument`] of a model that is not trained.
pub fn update(
    backend: &dyn Backend,
    model: &mut Model,
    config: &AdamWConfig,
    gradients: &Gradients,
    counts: &[Tensor],
    step: StepNumbers,
) -> Result<()> {
    let [c1, c2] = step.bias_corrections;
    let numbers = backend.upload(DType::F32, &[3], &[step.learning_rate, c1, c2])?;
    let adamw = |(arena, state): (&Arena, &ArenaState), grads: &Tensor, from: usize, to: usize, decay: f64| {
        let param_bf16 = arena.param_bf16.as_ref().map(|b| b.slice(from, to)).transpose()?;
        AdamW {
            grad: &grads.slice(from, to)?,
            clip: &gradients.clip,
            step: &numbers,
            beta1: single(config.beta1),
            beta2: single(config.beta2),
            eps: single(config.eps),
            decay: single(decay),
            param: &arena.master.slice(from, to)?,
            m: &state.moments.m.slice(from, to)?,
            v: &state.moments.v.slice(from, to)?,
            param_bf16: param_bf16.as_ref(),
        }
        .run(backend)
    };
    let (params, state, sums) = (&model.params, state(model)?, &gradients.sums);
    let replicated = (&params.replicated, &state.replicated);
    let experts = (&params.experts, &state.experts);
    let (decayed, len) = (params.replicated.decayed, params.replicated.len);
    adamw(replicated, &sums.replicated, 0, decayed, config.weight_decay)?;
    adamw(replicated, &sums.replicated, decayed, len, 0.0)?;
    adamw(experts, &sums.experts, 0, params.experts.len, config.weight_decay)?;
    if config.bias_update_rate > 0.0 {
        for (balancing, counts) in model.balancing().zip(counts) {
            if let Some(bias) = &balancing.bias {
                BiasUpdate { counts, rate: single(config.bias_update_rate), bias }.run(backend)?;
            }
        }
    }
    model.prepare(backend)
}
