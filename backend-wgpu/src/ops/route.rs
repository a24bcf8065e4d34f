//! Routing: scores and choices, their gradient, the plan of the exchange, and the layout of what was received.

use dropless_core::launch::Given;
use dropless_core::launch::route::{self as tables, LayoutScalars, PlanScalars, TopKGradScalars, TopKScalars};
use dropless_core::ops::{Balance, Checked, Layout, NONE, Plan, Route, TopK, TopKGrad};
use dropless_core::{DType, Result};

use super::map::elementwise;
use crate::buffer;
use crate::dispatch::{Dispatch, Stream};
use crate::shader::{BALANCE, Binding, CHOICES, EX2, F32, PRELUDE, ROW, SCAN, SIGMOID, Shader, U32, scalars, word};

pub(crate) static TOP_K: Shader<TopKScalars> = Shader::new(
    "route_top_k",
    &[PRELUDE, EX2, SIGMOID, include_str!("../../../shaders/route_top_k.wgsl")],
    tables::TOP_K,
)
.constants(tables::TOP_K_CONSTANTS);

scalars!(
    /// Extents (`tokens`: of a sequence); `coefficient`: the bits of an f32.
    pub(crate) struct BalanceScalars { sequences, tokens, k, experts, coefficient }
);

pub(crate) static SEQUENCES: Shader<BalanceScalars> = Shader::new(
    "route_balance",
    &[PRELUDE, ROW, BALANCE, include_str!("../../../shaders/route_balance.wgsl")],
    &[
        Binding::read("scores", F32),
        Binding::read("ids", U32),
        Binding::write("counts", U32),
        Binding::write("loss", F32),
    ],
)
.constants(&["EXPERTS"]);

pub(crate) static VALID: Shader<BalanceScalars> = Shader::new(
    "route_valid",
    &[include_str!("../../../shaders/route_valid.wgsl")],
    &[Binding::read("ids", U32), Binding::write("out", U32)],
);

pub(crate) static TOP_K_GRAD: Shader<TopKGradScalars> = Shader::new(
    "route_top_k_grad",
    &[PRELUDE, ROW, BALANCE, include_str!("../../../shaders/route_top_k_grad.wgsl")],
    tables::TOP_K_GRAD,
)
.constants(tables::TOP_K_GRAD_CONSTANTS);

pub(crate) static PLAN: Shader<PlanScalars> = Shader::new(
    "route_plan",
    &[SCAN, include_str!("../../../shaders/route_plan.wgsl")],
    &[
        Binding::read("ids", U32),
        Binding::write("rows", U32),
        Binding::write("counts", U32),
        Binding::write("positions", U32),
    ],
);

pub(crate) static LAYOUT_COUNT: Shader<LayoutScalars> = Shader::new(
    "route_layout_count",
    &[CHOICES, include_str!("../../../shaders/route_layout_count.wgsl")],
    &[Binding::read("ids", U32), Binding::read("counts", U32), Binding::atomic("totals", U32)],
);

pub(crate) static LAYOUT_OFFSETS: Shader<LayoutScalars> = Shader::new(
    "route_layout_offsets",
    &[include_str!("../../../shaders/route_layout_offsets.wgsl")],
    &[Binding::read("totals", U32), Binding::write("offsets", U32)],
);

pub(crate) static LAYOUT_PLACE: Shader<LayoutScalars> = Shader::new(
    "route_layout_place",
    &[SCAN, CHOICES, include_str!("../../../shaders/route_layout_place.wgsl")],
    &[
        Binding::read("ids", U32),
        Binding::read("counts", U32),
        Binding::read("weights", F32),
        Binding::read("offsets", U32),
        Binding::write("slot_rows", U32),
        Binding::write("slot_weights", F32),
        Binding::write("row_slots", U32),
    ],
);

pub(crate) fn run(stream: &Stream, op: &Checked<Route<'_>>) -> Result<()> {
    match &**op {
        Route::TopK(op) => top_k(stream, op),
        Route::TopKGrad(op) => top_k_grad(stream, op),
        Route::Plan(op) => plan(stream, op),
        Route::Layout(op) => layout(stream, op),
    }
}

fn top_k(stream: &Stream, op: &TopK<'_>) -> Result<()> {
    let Given { scalars, tensors, constants } = tables::top_k(op);
    let workgroups = op.scores.rows().div_ceil(32);
    stream.dispatch(Dispatch { constants: &constants, ..Dispatch::new(&TOP_K, scalars, &tensors, workgroups) })?;
    let Some(balance) = &op.balance else { return Ok(()) };
    let (sequences, scalars) = sequences(balance, op.ids.cols());
    let tensors = [Some(op.scores), Some(op.ids), Some(balance.counts), Some(balance.loss)];
    let constants = &[word(op.scores.cols())];
    stream.dispatch(Dispatch { constants, ..Dispatch::new(&SEQUENCES, scalars, &tensors, sequences) })
}

fn sequences(balance: &Balance<'_>, k: usize) -> (usize, BalanceScalars) {
    let (sequences, experts) = (balance.counts.rows(), word(balance.counts.cols()));
    let (tokens, coefficient) = (word(balance.sequence), balance.coefficient.to_bits());
    (sequences, BalanceScalars { sequences: word(sequences), tokens, k: word(k), experts, coefficient })
}

fn top_k_grad(stream: &Stream, op: &TopKGrad<'_>) -> Result<()> {
    let mut valid = None;
    if let Some(balance) = &op.balance {
        let (sequences, scalars) = sequences(balance, op.ids.cols());
        let out = valid.insert(buffer::alloc(&stream.gpu, DType::U32, &[sequences])?);
        stream.dispatch(Dispatch::new(&VALID, scalars, &[Some(op.ids), Some(out)], sequences))?;
    }
    let Given { scalars, tensors, constants } = tables::top_k_grad(op, valid.as_ref());
    let tokens = op.scores.rows();
    stream.dispatch(Dispatch { constants: &constants, ..Dispatch::new(&TOP_K_GRAD, scalars, &tensors, tokens) })
}

fn plan(stream: &Stream, op: &Plan<'_>) -> Result<()> {
    let tensors = [Some(op.ids), Some(op.rows), Some(op.counts), Some(op.positions)];
    stream.dispatch(Dispatch::new(&PLAN, PlanScalars::from(op), &tensors, op.counts.len()))
}

fn layout(stream: &Stream, op: &Layout<'_>) -> Result<()> {
    let experts = op.offsets.len() - 1;
    let scalars = LayoutScalars::from(op);
    elementwise::fill_bits(stream, op.slot_rows, NONE)?;
    elementwise::fill_bits(stream, op.row_slots, NONE)?;
    // New memory is zero.
    let totals = buffer::alloc(&stream.gpu, DType::U32, &[experts])?;
    let (ids, counts) = (Some(op.ids), Some(op.counts));
    stream.dispatch(Dispatch::new(&LAYOUT_COUNT, scalars, &[ids, counts, Some(&totals)], experts))?;
    stream.dispatch(Dispatch::new(&LAYOUT_OFFSETS, scalars, &[Some(&totals), Some(op.offsets)], 1))?;
    let tensors = [
        ids,
        counts,
        Some(op.weights),
        Some(op.offsets),
        Some(op.slot_rows),
        Some(op.slot_weights),
        Some(op.row_slots),
    ];
    stream.dispatch(Dispatch::new(&LAYOUT_PLACE, scalars, &tensors, experts))
}
