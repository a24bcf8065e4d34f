//! Routing: scores and choices, their gradient, the plan of the exchange, and the layout of what was received.
//!
//! The plan and the layout are stable counting sorts of three passes: thread blocks count, the counts are scanned, and
//! thread blocks place. Nothing but the scans is serial, and the host reads nothing.

use std::sync::Arc;

use dropless_core::launch::Given;
use dropless_core::launch::route::{self as tables, LayoutScalars, PlanScalars, TopKGradScalars, TopKScalars};
use dropless_core::numerics::reduce::TOKEN_BLOCK;
use dropless_core::ops::{Balance, Checked, Layout, Plan, Route, TopK, TopKGrad};
use dropless_core::{DType, Result, Tensor};

use crate::device::Gpu;
use crate::kernel::{
    BALANCE, Binding, CHOICES, EXPERTS, F32, Kernel, Launch, PRELUDE, RANKS, RUNS, SCAN, U32, VALID, scalars, word,
};

const OP: &str = "route";

/// Tokens of a thread block at a time, here and in [`TOP_K_GRAD`]: one a warp.
const BLOCK_WARPS: usize = 4;

pub(crate) static TOP_K: Kernel<TopKScalars> = Kernel::new(
    "route_top_k",
    &[PRELUDE, RUNS, EXPERTS, include_str!("../../../kernels/route_top_k.cu")],
    tables::TOP_K,
)
.constants(tables::TOP_K_CONSTANTS);

scalars!(
    /// Extents (`tokens`: of a sequence; `blocks`: thread blocks of a sequence); `coefficient`: the bits of an f32.
    pub(crate) struct SequenceScalars { tokens, k, experts, blocks, coefficient }
);

pub(crate) static BALANCE_BLOCKS: Kernel<SequenceScalars> = Kernel::new(
    "route_balance_blocks",
    &[PRELUDE, RUNS, EXPERTS, BALANCE, VALID, include_str!("../../../kernels/route_balance_blocks.cu")],
    &[
        Binding::read("scores", F32),
        Binding::read("ids", U32),
        Binding::in_place("counts", U32),
        Binding::in_place("valid", U32),
        Binding::write("sums", F32),
    ],
)
.constants(&["EXPERTS"]);

pub(crate) static BALANCE_LOSS: Kernel<SequenceScalars> = Kernel::new(
    "route_balance_loss",
    &[PRELUDE, BALANCE, include_str!("../../../kernels/route_balance_loss.cu")],
    &[
        Binding::read("sums", F32),
        Binding::read("counts", U32),
        Binding::read("valid", U32),
        Binding::write("loss", F32),
    ],
)
.constants(&["EXPERTS"]);

pub(crate) static VALID_TOKENS: Kernel<SequenceScalars> = Kernel::new(
    "route_valid",
    &[PRELUDE, VALID, include_str!("../../../kernels/route_valid.cu")],
    &[Binding::read("ids", U32), Binding::in_place("valid", U32)],
);

pub(crate) static TOP_K_GRAD: Kernel<TopKGradScalars> = Kernel::new(
    "route_top_k_grad",
    &[PRELUDE, RUNS, EXPERTS, BALANCE, VALID, include_str!("../../../kernels/route_top_k_grad.cu")],
    tables::TOP_K_GRAD,
)
.constants(tables::TOP_K_GRAD_CONSTANTS);

pub(crate) static PLAN_COUNT: Kernel<PlanScalars> = Kernel::new(
    "route_plan_count",
    &[PRELUDE, RANKS, include_str!("../../../kernels/route_plan_count.cu")],
    &[Binding::read("ids", U32), Binding::write("table", U32)],
);

pub(crate) static PLAN_PLACE: Kernel<PlanScalars> = Kernel::new(
    "route_plan_place",
    &[PRELUDE, RANKS, include_str!("../../../kernels/route_plan_place.cu")],
    &[
        Binding::read("ids", U32),
        Binding::read("table", U32),
        Binding::write("rows", U32),
        Binding::write("positions", U32),
    ],
);

scalars!(
    /// Extents of the table.
    pub(crate) struct ScanScalars { rows, columns }
);

pub(crate) static TABLE_SCAN: Kernel<ScanScalars> = Kernel::new(
    "route_scan",
    &[PRELUDE, SCAN, include_str!("../../../kernels/route_scan.cu")],
    &[Binding::in_place("table", U32), Binding::write("totals", U32)],
);

pub(crate) static LAYOUT_COUNT: Kernel<LayoutScalars> = Kernel::new(
    "route_layout_count",
    &[PRELUDE, CHOICES, include_str!("../../../kernels/route_layout_count.cu")],
    &[Binding::read("ids", U32), Binding::read("counts", U32), Binding::write("table", U32)],
);

pub(crate) static LAYOUT_OFFSETS: Kernel<LayoutScalars> = Kernel::new(
    "route_layout_offsets",
    &[PRELUDE, SCAN, include_str!("../../../kernels/route_layout_offsets.cu")],
    &[Binding::read("totals", U32), Binding::write("offsets", U32)],
);

pub(crate) static LAYOUT_PLACE: Kernel<LayoutScalars> = Kernel::new(
    "route_layout_place",
    &[PRELUDE, CHOICES, include_str!("../../../kernels/route_layout_place.cu")],
    &[
        Binding::read("ids", U32),
        Binding::read("counts", U32),
        Binding::read("weights", F32),
        Binding::read("offsets", U32),
        Binding::read("table", U32),
        Binding::write("slot_rows", U32),
        Binding::write("slot_weights", F32),
        Binding::write("row_slots", U32),
    ],
);

pub(crate) fn run(gpu: &Arc<Gpu>, op: &Checked<Route<'_>>) -> Result<()> {
    match &**op {
        Route::TopK(op) => top_k(gpu, op),
        Route::TopKGrad(op) => top_k_grad(gpu, op),
        Route::Plan(op) => plan(gpu, op),
        Route::Layout(op) => layout(gpu, op),
    }
}

/// Integers that begin as zero.
fn zeros(gpu: &Arc<Gpu>, shape: &[usize]) -> Result<Tensor> {
    let tensor = gpu.alloc(DType::U32, shape)?;
    gpu.fill(OP, &tensor, 0)?;
    Ok(tensor)
}

fn top_k(gpu: &Arc<Gpu>, op: &TopK<'_>) -> Result<()> {
    let Given { scalars, tensors, constants } = tables::top_k(op);
    // Enough thread blocks to fill the card; more would add their counts to the totals more often.
    let blocks = op.scores.rows().div_ceil(BLOCK_WARPS).min(gpu.multiprocessors as usize * 8);
    gpu.launch(Launch { constants: &constants, ..Launch::new(&TOP_K, scalars, &tensors, blocks, 128) })?;
    op.balance.as_ref().map_or(Ok(()), |balance| loss(gpu, op, balance))
}

fn loss(gpu: &Arc<Gpu>, op: &TopK<'_>, balance: &Balance<'_>) -> Result<()> {
    let (sequences, experts) = (balance.counts.rows(), op.scores.cols());
    let blocks = balance.sequence.div_ceil(TOKEN_BLOCK);
    let scalars = sequence_scalars(balance, op.ids.cols(), blocks);
    let valid = zeros(gpu, &[sequences])?;
    let sums = gpu.alloc(DType::F32, &[sequences, blocks, experts])?;
    gpu.fill(OP, balance.counts, 0)?;
    let constants = &[word(experts)];
    let tensors = [Some(op.scores), Some(op.ids), Some(balance.counts), Some(&valid), Some(&sums)];
    gpu.launch(Launch { constants, ..Launch::new(&BALANCE_BLOCKS, scalars, &tensors, sequences * blocks, 256) })?;
    let tensors = [Some(&sums), Some(balance.counts), Some(&valid), Some(balance.loss)];
    gpu.launch(Launch { constants, ..Launch::new(&BALANCE_LOSS, scalars, &tensors, sequences, 256) })
}

fn sequence_scalars(balance: &Balance<'_>, k: usize, blocks: usize) -> SequenceScalars {
    let (tokens, coefficient) = (word(balance.sequence), balance.coefficient.to_bits());
    let experts = word(balance.counts.cols());
    SequenceScalars { tokens, k: word(k), experts, blocks: word(blocks), coefficient }
}

fn top_k_grad(gpu: &Arc<Gpu>, op: &TopKGrad<'_>) -> Result<()> {
    let mut valid = None;
    if let Some(balance) = &op.balance {
        let (sequences, blocks) = (balance.counts.rows(), balance.sequence.div_ceil(256));
        let out = valid.insert(zeros(gpu, &[sequences])?);
        let scalars = sequence_scalars(balance, op.ids.cols(), blocks);
        gpu.launch(Launch::new(&VALID_TOKENS, scalars, &[Some(op.ids), Some(out)], sequences * blocks, 256))?;
    }
    let Given { scalars, tensors, constants } = tables::top_k_grad(op, valid.as_ref());
    let blocks = op.scores.rows().div_ceil(BLOCK_WARPS);
    gpu.launch(Launch { constants: &constants, ..Launch::new(&TOP_K_GRAD, scalars, &tensors, blocks, 128) })
}

/// Turns each count of a table `[rows, thread blocks]` into the sum of those before it in its row; `totals` receives the
/// sums of the rows.
fn scan(gpu: &Arc<Gpu>, table: &Tensor, totals: &Tensor) -> Result<()> {
    let rows = table.rows();
    let scalars = ScanScalars { rows: word(rows), columns: word(table.cols()) };
    gpu.launch(Launch::new(&TABLE_SCAN, scalars, &[Some(table), Some(totals)], rows.div_ceil(BLOCK_WARPS), 128))
}

fn plan(gpu: &Arc<Gpu>, op: &Plan<'_>) -> Result<()> {
    let (tokens, ranks) = (op.ids.rows(), op.counts.len());
    let scalars = PlanScalars::from(op);
    // One thread block at least, so that the counts are written without tokens, too.
    let blocks = tokens.div_ceil(256).max(1);
    let table = gpu.alloc(DType::U32, &[ranks, blocks])?;
    gpu.launch(Launch::new(&PLAN_COUNT, scalars, &[Some(op.ids), Some(&table)], blocks, 256))?;
    scan(gpu, &table, op.counts)?;
    // NONE, where no row is placed.
    gpu.fill(OP, op.rows, 0xFF)?;
    let tensors = [Some(op.ids), Some(&table), Some(op.rows), Some(op.positions)];
    gpu.launch(Launch::new(&PLAN_PLACE, scalars, &tensors, blocks, 256))
}

/// Warps of a thread block in the layout's kernels, and choices of a warp.
const LAYOUT_WARPS: usize = 8;
const WARP_CHOICES: usize = 256;

fn layout(gpu: &Arc<Gpu>, op: &Layout<'_>) -> Result<()> {
    let experts = op.offsets.len() - 1;
    let scalars = LayoutScalars::from(op);
    // One thread block at least, so that the offsets are written without choices, too.
    let blocks = op.ids.len().div_ceil(LAYOUT_WARPS * WARP_CHOICES).max(1);
    // The counts of each warp.
    let shared = word(LAYOUT_WARPS * experts * DType::U32.size());
    let table = gpu.alloc(DType::U32, &[experts, blocks])?;
    let totals = gpu.alloc(DType::U32, &[experts])?;
    let tensors = [Some(op.ids), Some(op.counts), Some(&table)];
    gpu.launch(Launch { shared, ..Launch::new(&LAYOUT_COUNT, scalars, &tensors, blocks, 256) })?;
    scan(gpu, &table, &totals)?;
    gpu.launch(Launch::new(&LAYOUT_OFFSETS, scalars, &[Some(&totals), Some(op.offsets)], 1, 32))?;
    // NONE, where no row is placed.
    gpu.fill(OP, op.slot_rows, 0xFF)?;
    let tensors = [
        Some(op.ids),
        Some(op.counts),
        Some(op.weights),
        Some(op.offsets),
        Some(&table),
        Some(op.slot_rows),
        Some(op.slot_weights),
        Some(op.row_slots),
    ];
    gpu.launch(Launch { shared, ..Launch::new(&LAYOUT_PLACE, scalars, &tensors, blocks, 256) })
}
