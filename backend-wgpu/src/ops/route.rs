//! Routing: scores and choices, their gradient, the plan of the exchange, and the layout of what was received.

use dropless_core::ops::{Balance, Checked, Layout, NONE, Plan, Route, Score, TopK, TopKGrad, Window};
use dropless_core::{DType, Result, Tensor};

use super::map::elementwise;
use crate::buffer;
use crate::dispatch::{Dispatch, Stream, word};
use crate::shader::{BALANCE, Binding, CHOICES, F32, MATH, PRELUDE, ROW, SCAN, Shader, U32, params};

params!(
    /// Extents and options; `scale` and `guard`: the bits of f32.
    TopKParams { tokens, k, top_groups, normalize, scale, guard }
);

pub(crate) static TOP_K: Shader = Shader {
    name: "route_top_k",
    files: &[PRELUDE, MATH, include_str!("../../../shaders/route_top_k.wgsl")],
    params: TopKParams::FIELDS,
    bindings: &[
        Binding::read("logits", F32),
        Binding::read("bias", F32).optional(),
        Binding::read("valid", U32).optional(),
        Binding::write("scores", F32),
        Binding::write("ids", U32),
        Binding::write("weights", F32),
        Binding::atomic("counts", U32),
    ],
    constants: &["EXPERTS", "GROUPS", "SOFTMAX"],
};

params!(
    /// Extents (`tokens`: of a sequence); `coefficient`: the bits of an f32.
    BalanceParams { sequences, tokens, k, coefficient }
);

pub(crate) static SEQUENCES: Shader = Shader {
    name: "route_balance",
    files: &[PRELUDE, ROW, BALANCE, include_str!("../../../shaders/route_balance.wgsl")],
    params: BalanceParams::FIELDS,
    bindings: &[
        Binding::read("scores", F32),
        Binding::read("ids", U32),
        Binding::write("counts", U32),
        Binding::write("loss", F32),
    ],
    constants: &["EXPERTS"],
};

pub(crate) static VALID: Shader = Shader {
    name: "route_valid",
    files: &[include_str!("../../../shaders/route_valid.wgsl")],
    params: BalanceParams::FIELDS,
    bindings: &[Binding::read("ids", U32), Binding::write("out", U32)],
    constants: &[],
};

params!(
    /// Extents (`sequence`: tokens of one) and options; `scale`, `guard` and `coefficient`: the bits of f32.
    TopKGradParams { tokens, k, sequence, normalize, scale, guard, coefficient }
);

pub(crate) static TOP_K_GRAD: Shader = Shader {
    name: "route_top_k_grad",
    files: &[PRELUDE, ROW, BALANCE, include_str!("../../../shaders/route_top_k_grad.wgsl")],
    params: TopKGradParams::FIELDS,
    bindings: &[
        Binding::read("scores", F32),
        Binding::read("ids", U32),
        Binding::read("d_weights", F32),
        Binding::read("counts", U32).optional(),
        Binding::read("valid", U32).optional(),
        Binding::write("d_logits", F32),
    ],
    constants: &["EXPERTS", "SOFTMAX"],
};

params!(
    /// Extents, and the tokens that take part within each period.
    PlanParams { ranks, tokens, k, rank_experts, capacity, window_period, window_begin, window_end }
);

pub(crate) static PLAN: Shader = Shader {
    name: "route_plan",
    files: &[SCAN, include_str!("../../../shaders/route_plan.wgsl")],
    params: PlanParams::FIELDS,
    bindings: &[
        Binding::read("ids", U32),
        Binding::write("rows", U32),
        Binding::write("counts", U32),
        Binding::write("positions", U32),
    ],
    constants: &[],
};

params!(
    /// Extents; `one` is 1.
    LayoutParams { experts, choices, k, capacity, first_expert, one }
);

pub(crate) static LAYOUT_COUNT: Shader = Shader {
    name: "route_layout_count",
    files: &[CHOICES, include_str!("../../../shaders/route_layout_count.wgsl")],
    params: LayoutParams::FIELDS,
    bindings: &[Binding::read("ids", U32), Binding::read("counts", U32), Binding::atomic("totals", U32)],
    constants: &[],
};

pub(crate) static LAYOUT_OFFSETS: Shader = Shader {
    name: "route_layout_offsets",
    files: &[include_str!("../../../shaders/route_layout_offsets.wgsl")],
    params: LayoutParams::FIELDS,
    bindings: &[Binding::read("totals", U32), Binding::write("offsets", U32)],
    constants: &[],
};

pub(crate) static LAYOUT_PLACE: Shader = Shader {
    name: "route_layout_place",
    files: &[SCAN, CHOICES, include_str!("../../../shaders/route_layout_place.wgsl")],
    params: LayoutParams::FIELDS,
    bindings: &[
        Binding::read("ids", U32),
        Binding::read("counts", U32),
        Binding::read("weights", F32),
        Binding::read("offsets", U32),
        Binding::write("slot_rows", U32),
        Binding::write("slot_weights", F32),
        Binding::write("row_slots", U32),
    ],
    constants: &[],
};

pub(crate) fn run(stream: &Stream, op: &Checked<Route<'_>>) -> Result<()> {
    match &**op {
        Route::TopK(op) => top_k(stream, op),
        Route::TopKGrad(op) => top_k_grad(stream, op),
        Route::Plan(op) => plan(stream, op),
        Route::Layout(op) => layout(stream, op),
    }
}

/// One workgroup for each of `count` things.
fn dispatch(
    stream: &Stream,
    shader: &'static Shader,
    tensors: &[Option<&Tensor>],
    constants: &[u32],
    params: Vec<u32>,
    count: usize,
) -> Result<()> {
    stream.dispatch(Dispatch { shader, tensors, constants, params, workgroups: count as u64 })
}

fn top_k(stream: &Stream, op: &TopK<'_>) -> Result<()> {
    let (tokens, experts, k) = (op.scores.rows(), op.scores.cols(), op.ids.cols());
    let params = TopKParams {
        tokens: word(tokens),
        k: word(k),
        top_groups: word(op.top_groups),
        normalize: u32::from(op.normalize),
        scale: op.scale.to_bits(),
        guard: TopK::GUARD.to_bits(),
    };
    let tensors =
        [Some(op.logits), op.bias, op.valid, Some(op.scores), Some(op.ids), Some(op.weights), Some(op.counts)];
    let constants = [word(experts), word(op.groups), u32::from(op.score == Score::Softmax)];
    dispatch(stream, &TOP_K, &tensors, &constants, params.words(), tokens.div_ceil(32))?;
    let Some(balance) = &op.balance else { return Ok(()) };
    let (sequences, params) = sequences(balance, k);
    let tensors = [Some(op.scores), Some(op.ids), Some(balance.counts), Some(balance.loss)];
    dispatch(stream, &SEQUENCES, &tensors, &[word(experts)], params.words(), sequences)
}

fn sequences(balance: &Balance<'_>, k: usize) -> (usize, BalanceParams) {
    let sequences = balance.counts.rows();
    let (tokens, coefficient) = (word(balance.sequence), balance.coefficient.to_bits());
    (sequences, BalanceParams { sequences: word(sequences), tokens, k: word(k), coefficient })
}

fn top_k_grad(stream: &Stream, op: &TopKGrad<'_>) -> Result<()> {
    let (tokens, experts, k) = (op.scores.rows(), op.scores.cols(), op.ids.cols());
    let mut params = TopKGradParams {
        tokens: word(tokens),
        k: word(k),
        sequence: 1,
        normalize: u32::from(op.normalize),
        scale: op.scale.to_bits(),
        guard: TopK::GUARD.to_bits(),
        coefficient: 0,
    };
    let mut valid = None;
    if let Some(balance) = &op.balance {
        params.sequence = word(balance.sequence);
        params.coefficient = balance.coefficient.to_bits();
        let (sequences, params) = sequences(balance, k);
        let out = valid.insert(buffer::alloc(&stream.gpu, DType::U32, &[sequences])?);
        dispatch(stream, &VALID, &[Some(op.ids), Some(out)], &[], params.words(), sequences)?;
    }
    let counts = op.balance.as_ref().map(|balance| balance.counts);
    let tensors = [Some(op.scores), Some(op.ids), Some(op.d_weights), counts, valid.as_ref(), Some(op.d_logits)];
    let constants = [word(experts), u32::from(op.score == Score::Softmax)];
    dispatch(stream, &TOP_K_GRAD, &tensors, &constants, params.words(), tokens)
}

fn plan(stream: &Stream, op: &Plan<'_>) -> Result<()> {
    let (tokens, ranks) = (op.ids.rows(), op.counts.len());
    let window = op.window.unwrap_or(Window { period: tokens.max(1), from: 0, to: tokens });
    let params = PlanParams {
        ranks: word(ranks),
        tokens: word(tokens),
        k: word(op.ids.cols()),
        rank_experts: word(op.experts / ranks),
        capacity: word(op.rows.cols()),
        window_period: word(window.period),
        window_begin: word(window.from),
        window_end: word(window.to),
    };
    let tensors = [Some(op.ids), Some(op.rows), Some(op.counts), Some(op.positions)];
    dispatch(stream, &PLAN, &tensors, &[], params.words(), ranks)
}

fn layout(stream: &Stream, op: &Layout<'_>) -> Result<()> {
    let experts = op.offsets.len() - 1;
    let params = LayoutParams {
        experts: word(experts),
        choices: word(op.ids.len()),
        k: word(op.ids.cols()),
        capacity: word(op.ids.shape()[1]),
        first_expert: word(op.first_expert),
        one: 1,
    };
    elementwise::fill_bits(stream, op.slot_rows, NONE)?;
    elementwise::fill_bits(stream, op.row_slots, NONE)?;
    // New memory is zero.
    let totals = buffer::alloc(&stream.gpu, DType::U32, &[experts])?;
    let (ids, counts) = (Some(op.ids), Some(op.counts));
    dispatch(stream, &LAYOUT_COUNT, &[ids, counts, Some(&totals)], &[], params.words(), experts)?;
    dispatch(stream, &LAYOUT_OFFSETS, &[Some(&totals), Some(op.offsets)], &[], params.words(), 1)?;
    let tensors = [
        ids,
        counts,
        Some(op.weights),
        Some(op.offsets),
        Some(op.slot_rows),
        Some(op.slot_weights),
        Some(op.row_slots),
    ];
    dispatch(stream, &LAYOUT_PLACE, &tensors, &[], params.words(), experts)
}
