//! Routing: scores and choices, their gradient, the plan of the exchange, and the layout of what was received.
//!
//! The plan and the layout are stable counting sorts of three passes: thread blocks count, the counts are scanned, and
//! thread blocks place. Nothing but the scans is serial, and the host reads nothing.

use std::sync::Arc;

use dropless_core::numerics::reduce::TOKEN_BLOCK;
use dropless_core::ops::{Balance, Checked, Layout, Plan, Route, Score, TopK, TopKGrad, Window};
use dropless_core::{DType, Result, Tensor};

use crate::device::{Gpu, word};
use crate::kernel::{
    BALANCE, Binding, CHOICES, EXPERTS, F32, Kernel, Launch, PRELUDE, RANKS, RUNS, SCAN, U32, VALID, params,
};

const OP: &str = "route";

params!(
    /// Extents and options; `scale` and `guard`: the bits of f32.
    TopKParams { tokens, k, top_groups, normalize, scale, guard }
);

/// Tokens of a thread block at a time, here and in [`TOP_K_GRAD`]: one a warp.
const BLOCK_WARPS: usize = 4;

pub(crate) static TOP_K: Kernel = Kernel {
    name: "route_top_k",
    files: &[PRELUDE, RUNS, EXPERTS, include_str!("../../../kernels/route_top_k.cu")],
    params: TopKParams::FIELDS,
    tensors: &[
        Binding::read("logits", F32),
        Binding::read("bias", F32).optional(),
        Binding::read("valid", U32).optional(),
        Binding::write("scores", F32),
        Binding::write("ids", U32),
        Binding::write("weights", F32),
        Binding::in_place("counts", U32),
    ],
    maps: 0,
    constants: &["EXPERTS", "GROUPS", "SOFTMAX"],
};

params!(
    /// Extents (`tokens`: of a sequence; `blocks`: thread blocks of a sequence); `coefficient`: the bits of an f32.
    SequenceParams { tokens, k, blocks, coefficient }
);

pub(crate) static BALANCE_BLOCKS: Kernel = Kernel {
    name: "route_balance_blocks",
    files: &[PRELUDE, RUNS, EXPERTS, BALANCE, VALID, include_str!("../../../kernels/route_balance_blocks.cu")],
    params: SequenceParams::FIELDS,
    tensors: &[
        Binding::read("scores", F32),
        Binding::read("ids", U32),
        Binding::in_place("counts", U32),
        Binding::in_place("valid", U32),
        Binding::write("sums", F32),
    ],
    maps: 0,
    constants: &["EXPERTS"],
};

pub(crate) static BALANCE_LOSS: Kernel = Kernel {
    name: "route_balance_loss",
    files: &[PRELUDE, BALANCE, include_str!("../../../kernels/route_balance_loss.cu")],
    params: SequenceParams::FIELDS,
    tensors: &[
        Binding::read("sums", F32),
        Binding::read("counts", U32),
        Binding::read("valid", U32),
        Binding::write("loss", F32),
    ],
    maps: 0,
    constants: &["EXPERTS"],
};

pub(crate) static VALID_TOKENS: Kernel = Kernel {
    name: "route_valid",
    files: &[PRELUDE, VALID, include_str!("../../../kernels/route_valid.cu")],
    params: SequenceParams::FIELDS,
    tensors: &[Binding::read("ids", U32), Binding::in_place("valid", U32)],
    maps: 0,
    constants: &[],
};

params!(
    /// Extents (`sequence`: tokens of one) and options; `scale`, `guard` and `coefficient`: the bits of f32.
    TopKGradParams { tokens, k, sequence, normalize, scale, guard, coefficient }
);

pub(crate) static TOP_K_GRAD: Kernel = Kernel {
    name: "route_top_k_grad",
    files: &[PRELUDE, RUNS, EXPERTS, BALANCE, VALID, include_str!("../../../kernels/route_top_k_grad.cu")],
    params: TopKGradParams::FIELDS,
    tensors: &[
        Binding::read("scores", F32),
        Binding::read("ids", U32),
        Binding::read("d_weights", F32),
        Binding::read("counts", U32).optional(),
        Binding::read("valid", U32).optional(),
        Binding::write("d_logits", F32),
    ],
    maps: 0,
    constants: &["EXPERTS", "SOFTMAX"],
};

params!(
    /// Extents, and the tokens that take part within each period.
    PlanParams { ranks, tokens, k, rank_experts, capacity, window_period, window_begin, window_end }
);

pub(crate) static PLAN_COUNT: Kernel = Kernel {
    name: "route_plan_count",
    files: &[PRELUDE, RANKS, include_str!("../../../kernels/route_plan_count.cu")],
    params: PlanParams::FIELDS,
    tensors: &[Binding::read("ids", U32), Binding::write("table", U32)],
    maps: 0,
    constants: &[],
};

pub(crate) static PLAN_PLACE: Kernel = Kernel {
    name: "route_plan_place",
    files: &[PRELUDE, RANKS, include_str!("../../../kernels/route_plan_place.cu")],
    params: PlanParams::FIELDS,
    tensors: &[
        Binding::read("ids", U32),
        Binding::read("table", U32),
        Binding::write("rows", U32),
        Binding::write("positions", U32),
    ],
    maps: 0,
    constants: &[],
};

params!(
    /// Extents of the table.
    ScanParams { rows, columns }
);

pub(crate) static TABLE_SCAN: Kernel = Kernel {
    name: "route_scan",
    files: &[PRELUDE, SCAN, include_str!("../../../kernels/route_scan.cu")],
    params: ScanParams::FIELDS,
    tensors: &[Binding::in_place("table", U32), Binding::write("totals", U32)],
    maps: 0,
    constants: &[],
};

params!(
    /// Extents.
    LayoutParams { experts, choices, k, capacity, first_expert, slots }
);

pub(crate) static LAYOUT_COUNT: Kernel = Kernel {
    name: "route_layout_count",
    files: &[PRELUDE, CHOICES, include_str!("../../../kernels/route_layout_count.cu")],
    params: LayoutParams::FIELDS,
    tensors: &[Binding::read("ids", U32), Binding::read("counts", U32), Binding::write("table", U32)],
    maps: 0,
    constants: &[],
};

pub(crate) static LAYOUT_OFFSETS: Kernel = Kernel {
    name: "route_layout_offsets",
    files: &[PRELUDE, SCAN, include_str!("../../../kernels/route_layout_offsets.cu")],
    params: LayoutParams::FIELDS,
    tensors: &[Binding::read("totals", U32), Binding::write("offsets", U32)],
    maps: 0,
    constants: &[],
};

pub(crate) static LAYOUT_PLACE: Kernel = Kernel {
    name: "route_layout_place",
    files: &[PRELUDE, CHOICES, include_str!("../../../kernels/route_layout_place.cu")],
    params: LayoutParams::FIELDS,
    tensors: &[
        Binding::read("ids", U32),
        Binding::read("counts", U32),
        Binding::read("weights", F32),
        Binding::read("offsets", U32),
        Binding::read("table", U32),
        Binding::write("slot_rows", U32),
        Binding::write("slot_weights", F32),
        Binding::write("row_slots", U32),
    ],
    maps: 0,
    constants: &[],
};

pub(crate) fn run(gpu: &Arc<Gpu>, op: &Checked<Route<'_>>) -> Result<()> {
    match &**op {
        Route::TopK(op) => top_k(gpu, op),
        Route::TopKGrad(op) => top_k_grad(gpu, op),
        Route::Plan(op) => plan(gpu, op),
        Route::Layout(op) => layout(gpu, op),
    }
}

/// A launch without constants and dynamic shared memory.
fn launch<'a>(
    kernel: &'static Kernel,
    tensors: &'a [Option<&'a Tensor>],
    params: Vec<u32>,
    blocks: usize,
    threads: u32,
) -> Launch<'a> {
    Launch { kernel, tensors, constants: &[], params, maps: &[], blocks: blocks as u64, threads, shared: 0 }
}

/// Integers that begin as zero.
fn zeros(gpu: &Arc<Gpu>, shape: &[usize]) -> Result<Tensor> {
    let tensor = gpu.alloc(DType::U32, shape)?;
    gpu.fill(OP, &tensor, 0)?;
    Ok(tensor)
}

fn top_k(gpu: &Arc<Gpu>, op: &TopK<'_>) -> Result<()> {
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
    // Enough thread blocks to fill the card; more would add their counts to the totals more often.
    let blocks = tokens.div_ceil(BLOCK_WARPS).min(gpu.multiprocessors as usize * 8);
    gpu.launch(Launch { constants: &constants, ..launch(&TOP_K, &tensors, params.words(), blocks, 128) })?;
    op.balance.as_ref().map_or(Ok(()), |balance| loss(gpu, op, balance))
}

fn loss(gpu: &Arc<Gpu>, op: &TopK<'_>, balance: &Balance<'_>) -> Result<()> {
    let (sequences, experts) = (balance.counts.rows(), op.scores.cols());
    let blocks = balance.sequence.div_ceil(TOKEN_BLOCK);
    let params = sequence_params(balance, op.ids.cols(), blocks);
    let valid = zeros(gpu, &[sequences])?;
    let sums = gpu.alloc(DType::F32, &[sequences, blocks, experts])?;
    gpu.fill(OP, balance.counts, 0)?;
    let constants = [word(experts)];
    let tensors = [Some(op.scores), Some(op.ids), Some(balance.counts), Some(&valid), Some(&sums)];
    let count = launch(&BALANCE_BLOCKS, &tensors, params.words(), sequences * blocks, 256);
    gpu.launch(Launch { constants: &constants, ..count })?;
    let tensors = [Some(&sums), Some(balance.counts), Some(&valid), Some(balance.loss)];
    gpu.launch(Launch { constants: &constants, ..launch(&BALANCE_LOSS, &tensors, params.words(), sequences, 256) })
}

fn sequence_params(balance: &Balance<'_>, k: usize, blocks: usize) -> SequenceParams {
    let (tokens, coefficient) = (word(balance.sequence), balance.coefficient.to_bits());
    SequenceParams { tokens, k: word(k), blocks: word(blocks), coefficient }
}

fn top_k_grad(gpu: &Arc<Gpu>, op: &TopKGrad<'_>) -> Result<()> {
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
        let (sequences, blocks) = (balance.counts.rows(), balance.sequence.div_ceil(256));
        let out = valid.insert(zeros(gpu, &[sequences])?);
        let params = sequence_params(balance, k, blocks).words();
        gpu.launch(launch(&VALID_TOKENS, &[Some(op.ids), Some(out)], params, sequences * blocks, 256))?;
    }
    let counts = op.balance.as_ref().map(|balance| balance.counts);
    let tensors = [Some(op.scores), Some(op.ids), Some(op.d_weights), counts, valid.as_ref(), Some(op.d_logits)];
    let constants = [word(experts), u32::from(op.score == Score::Softmax)];
    let blocks = tokens.div_ceil(BLOCK_WARPS);
    gpu.launch(Launch { constants: &constants, ..launch(&TOP_K_GRAD, &tensors, params.words(), blocks, 128) })
}

/// Turns each count of a table `[rows, thread blocks]` into the sum of those before it in its row; `totals` receives the
/// sums of the rows.
fn scan(gpu: &Arc<Gpu>, table: &Tensor, totals: &Tensor) -> Result<()> {
    let rows = table.rows();
    let params = ScanParams { rows: word(rows), columns: word(table.cols()) };
    gpu.launch(launch(&TABLE_SCAN, &[Some(table), Some(totals)], params.words(), rows.div_ceil(BLOCK_WARPS), 128))
}

fn plan(gpu: &Arc<Gpu>, op: &Plan<'_>) -> Result<()> {
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
    // One thread block at least, so that the counts are written without tokens, too.
    let blocks = tokens.div_ceil(256).max(1);
    let table = gpu.alloc(DType::U32, &[ranks, blocks])?;
    gpu.launch(launch(&PLAN_COUNT, &[Some(op.ids), Some(&table)], params.words(), blocks, 256))?;
    scan(gpu, &table, op.counts)?;
    // NONE, where no row is placed.
    gpu.fill(OP, op.rows, 0xFF)?;
    let tensors = [Some(op.ids), Some(&table), Some(op.rows), Some(op.positions)];
    gpu.launch(launch(&PLAN_PLACE, &tensors, params.words(), blocks, 256))
}

/// Warps of a thread block in the layout's kernels, and choices of a warp.
const LAYOUT_WARPS: usize = 8;
const WARP_CHOICES: usize = 256;

fn layout(gpu: &Arc<Gpu>, op: &Layout<'_>) -> Result<()> {
    let experts = op.offsets.len() - 1;
    let params = LayoutParams {
        experts: word(experts),
        choices: word(op.ids.len()),
        k: word(op.ids.cols()),
        capacity: word(op.ids.shape()[1]),
        first_expert: word(op.first_expert),
        slots: word(op.slot_rows.len()),
    };
    // One thread block at least, so that the offsets are written without choices, too.
    let blocks = op.ids.len().div_ceil(LAYOUT_WARPS * WARP_CHOICES).max(1);
    // The counts of each warp.
    let shared = word(LAYOUT_WARPS * experts * DType::U32.size());
    let table = gpu.alloc(DType::U32, &[experts, blocks])?;
    let totals = gpu.alloc(DType::U32, &[experts])?;
    let tensors = [Some(op.ids), Some(op.counts), Some(&table)];
    gpu.launch(Launch { shared, ..launch(&LAYOUT_COUNT, &tensors, params.words(), blocks, 256) })?;
    scan(gpu, &table, &totals)?;
    gpu.launch(launch(&LAYOUT_OFFSETS, &[Some(&totals), Some(op.offsets)], params.words(), 1, 32))?;
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
    gpu.launch(Launch { shared, ..launch(&LAYOUT_PLACE, &tensors, params.words(), blocks, 256) })
}
