//! From the gradients of all ranks to new weights. NUMERICS.md, "Optimizer" and "Gradient shards and ranks".

use dropless_core::ops::{AdamW, AllToAll, BiasUpdate, ClipScale, GatherRows, SumRows, SumSquares, TreeSum};
use dropless_core::{Backend, DType, Group, Memory, Tensor};

use crate::collective::gather;
use crate::config::{TrainConfig, single};
use crate::error::Result;
use crate::model::{Arena, GradientSums, Model, ROW};
use crate::schedule;

/// The gradients of a step and their norm: of the replicated parameters the same on every rank, of the experts on every
/// rank that holds them.
#[derive(Debug)]
pub(super) struct Gradients {
    pub(super) sums: GradientSums,
    /// Norm and clipping factor, f32 `[2]`.
    pub(super) clip: Tensor,
}

/// Adds the shards of all ranks and computes the global norm.
pub(super) fn reduce(backend: &dyn Backend, model: &Model, train: &TrainConfig) -> Result<Gradients> {
    let GradientSums { replicated, experts } = model.params.reduce_shards(backend)?;
    let sums = GradientSums {
        replicated: reduce_ranks(backend, Group::World, replicated)?,
        experts: reduce_ranks(backend, Group::Replicas, experts)?,
    };
    let squares = squares(backend, model, &sums)?;
    let clip = backend.alloc(DType::F32, &[2], Memory::Device)?;
    ClipScale { squares: &squares, max_norm: single(train.max_grad_norm), out: &clip }.run(backend)?;
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
    Ok(gather(backend, group, &mine)?.reshape(&[ranks * piece])?)
}

/// Sums of squares in the one order that does not depend on the ranks: all replicated gradients, then each expert of
/// each expert parameter.
fn squares(backend: &dyn Backend, model: &Model, sums: &GradientSums) -> Result<Tensor> {
    let alloc = |shape: &[usize]| backend.alloc(DType::F32, shape, Memory::Device);
    let experts = model.params.expert_gradients(&sums.experts)?;
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
/// `step` counts from 1; `counts` holds all ranks' expert counts of each MoE layer.
pub(super) fn update(
    backend: &dyn Backend,
    model: &mut Model,
    train: &TrainConfig,
    gradients: &Gradients,
    counts: &[Tensor],
    step: u64,
) -> Result<()> {
    let [c1, c2] = schedule::bias_corrections(train, step);
    let numbers = [schedule::learning_rate(train, step), c1, c2];
    let numbers = backend.upload(DType::F32, &[3], &numbers)?;
    let adamw = |arena: &Arena, grads: &Tensor, from: usize, to: usize, decay: f64| -> Result<()> {
        let half = arena.half.as_ref().map(|h| h.slice(from, to)).transpose()?;
        AdamW {
            grad: &grads.slice(from, to)?,
            clip: &gradients.clip,
            step: &numbers,
            beta1: single(train.beta1),
            beta2: single(train.beta2),
            eps: single(train.eps),
            decay: single(decay),
            param: &arena.master.slice(from, to)?,
            m: &arena.m.slice(from, to)?,
            v: &arena.v.slice(from, to)?,
            half: half.as_ref(),
        }
        .run(backend)?;
        Ok(())
    };
    let (replicated, experts) = (&model.params.replicated, &model.params.experts);
    adamw(replicated, &gradients.sums.replicated, 0, replicated.decayed, train.weight_decay)?;
    adamw(replicated, &gradients.sums.replicated, replicated.decayed, replicated.len, 0.0)?;
    adamw(experts, &gradients.sums.experts, 0, experts.len, train.weight_decay)?;
    if train.bias_update_rate > 0.0 {
        for (balancing, counts) in model.balancing().zip(counts) {
            BiasUpdate { counts, rate: single(train.bias_update_rate), bias: &balancing.bias }.run(backend)?;
        }
    }
    model.prepare(backend)
}
