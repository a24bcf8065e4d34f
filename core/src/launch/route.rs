//! Routing as kernels take it. Where the kernels of all backends work on the same tensors, those stand here, too.

use super::{Binding, F32, Given, U32, word};
use crate::ops::{Layout, Plan, Score, TopK, TopKGrad, Window};
use crate::scalars;
use crate::tensor::Tensor;

scalars!(
    /// Extents and options; `scale` and `guard`: the bits of f32.
    pub struct TopKScalars { tokens, k, top_groups, normalize, scale, guard }
);

/// The tensors of a kernel for [`TopK`].
pub const TOP_K: &[Binding] = &[
    Binding::read("logits", F32),
    Binding::read("bias", F32).optional(),
    Binding::read("valid", U32).optional(),
    Binding::write("scores", F32),
    Binding::write("ids", U32),
    Binding::write("weights", F32),
    Binding::atomic("counts", U32),
];
/// Its constants.
pub const TOP_K_CONSTANTS: &[&str] = &["EXPERTS", "GROUPS", "SOFTMAX"];

/// What it is given.
pub fn top_k<'a>(op: &TopK<'a>) -> Given<'a, TopKScalars, 7, 3> {
    let (tokens, experts, k) = (op.scores.rows(), op.scores.cols(), op.ids.cols());
    Given {
        scalars: TopKScalars {
            tokens: word(tokens),
            k: word(k),
            top_groups: word(op.top_groups),
            normalize: u32::from(op.normalize),
            scale: op.scale.to_bits(),
            guard: TopK::GUARD.to_bits(),
        },
        tensors: [Some(op.logits), op.bias, op.valid, Some(op.scores), Some(op.ids), Some(op.weights), Some(op.counts)],
        constants: [word(experts), word(op.groups), softmax(op.score)],
    }
}

scalars!(
    /// Extents (`sequence`: tokens of one) and options; `scale`, `guard` and `coefficient`: the bits of f32.
    pub struct TopKGradScalars { tokens, k, sequence, normalize, scale, guard, coefficient }
);

/// The tensors of a kernel for [`TopKGrad`]; `valid`: the tokens of each sequence that are not padding.
pub const TOP_K_GRAD: &[Binding] = &[
    Binding::read("scores", F32),
    Binding::read("ids", U32),
    Binding::read("d_weights", F32),
    Binding::read("counts", U32).optional(),
    Binding::read("valid", U32).optional(),
    Binding::write("d_logits", F32),
];
/// Its constants.
pub const TOP_K_GRAD_CONSTANTS: &[&str] = &["EXPERTS", "SOFTMAX"];

/// What it is given.
pub fn top_k_grad<'a>(op: &TopKGrad<'a>, valid: Option<&'a Tensor>) -> Given<'a, TopKGradScalars, 6, 2> {
    let (tokens, experts, k) = (op.scores.rows(), op.scores.cols(), op.ids.cols());
    // Without a loss nobody looks at the sequences.
    let (sequence, coefficient) = op.balance.map_or((1, 0.0), |balance| (balance.sequence, balance.coefficient));
    let counts = op.balance.map(|balance| balance.counts);
    Given {
        scalars: TopKGradScalars {
            tokens: word(tokens),
            k: word(k),
            sequence: word(sequence),
            normalize: u32::from(op.normalize),
            scale: op.scale.to_bits(),
            guard: TopK::GUARD.to_bits(),
            coefficient: coefficient.to_bits(),
        },
        tensors: [Some(op.scores), Some(op.ids), Some(op.d_weights), counts, valid, Some(op.d_logits)],
        constants: [word(experts), softmax(op.score)],
    }
}

fn softmax(score: Score) -> u32 {
    u32::from(score == Score::Softmax)
}

scalars!(
    /// Extents, and the tokens that take part within each period.
    pub struct PlanScalars { ranks, tokens, k, rank_experts, capacity, window_period, window_begin, window_end }
);

impl From<&Plan<'_>> for PlanScalars {
    fn from(op: &Plan<'_>) -> PlanScalars {
        let (tokens, ranks) = (op.ids.rows(), op.counts.len());
        let window = op.window.unwrap_or(Window { period: tokens.max(1), from: 0, to: tokens });
        PlanScalars {
            ranks: word(ranks),
            tokens: word(tokens),
            k: word(op.ids.cols()),
            rank_experts: word(op.experts / ranks),
            capacity: word(op.rows.cols()),
            window_period: word(window.period),
            window_begin: word(window.from),
            window_end: word(window.to),
        }
    }
}

scalars!(
    /// Extents.
    pub struct LayoutScalars { experts, choices, k, capacity, first_expert, slots }
);

impl From<&Layout<'_>> for LayoutScalars {
    fn from(op: &Layout<'_>) -> LayoutScalars {
        LayoutScalars {
            experts: word(op.offsets.len() - 1),
            choices: word(op.ids.len()),
            k: word(op.ids.cols()),
            capacity: word(op.ids.shape()[1]),
            first_expert: word(op.first_expert),
            slots: word(op.slot_rows.len()),
        }
    }
}
