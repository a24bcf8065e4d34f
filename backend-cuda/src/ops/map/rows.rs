//! Rows moved by index: gather, combine, and the gradient of an embedding.

use std::sync::Arc;

use dropless_core::ops::{Combine, EmbeddingGrad, GatherRows, Window};
use dropless_core::{DType, Result};

use super::reduce::tree_stack;
use super::{RUN, Reads, THREADS, threads, warps};
use crate::device::Gpu;
use crate::kernel::{Binding, F32, FLOAT, Kernel, Launch, PRELUDE, RUNS, TREE, U32, scalars, word};

scalars!(
    /// Extents; `sources`: the rows of x.
    pub(crate) struct GatherRowsScalars { rows, columns, sources }
);

/// Reads and writes each row that has an index once.
pub(crate) static GATHER_ROWS: Kernel<GatherRowsScalars> = Kernel::new(
    "gather_rows",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/gather_rows.cu")],
    &[
        Binding::read("x", &[DType::F32, DType::Bf16, DType::U32]),
        Binding::read("index", U32),
        Binding::write("out", &[DType::F32, DType::Bf16, DType::U32]),
    ],
);

scalars!(
    /// Extents, the leaves of the tree, and the rows to write within each period; `slots`: the rows of x; `levels`: room
    /// on the stack.
    pub(crate) struct CombineScalars { columns, slots, k, leaf_begin, leaf_end, levels, window_period, window_begin, window_end }
);

/// Reads each row that is named once, and writes the sums once.
pub(crate) static COMBINE: Kernel<CombineScalars> = Kernel::new(
    "combine",
    &[PRELUDE, RUNS, TREE, include_str!("../../../../kernels/combine.cu")],
    &[
        Binding::read("x", FLOAT),
        Binding::read("slots", U32),
        Binding::read("ids", U32).optional(),
        Binding::read("first", FLOAT).optional(),
        Binding::read("second", FLOAT).optional(),
        Binding::write("out", FLOAT),
    ],
);

scalars!(
    /// Extents.
    pub(crate) struct EmbeddingGradScalars { columns, vocabulary, group_tokens }
);

/// Reads each gradient once, and reads and writes the rows of the table that occur once. Besides, the block of each token
/// reads the ids of its group, up to the one before with the same id or all.
pub(crate) static EMBEDDING_GRAD: Kernel<EmbeddingGradScalars> = Kernel::new(
    "embedding_grad",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/embedding_grad.cu")],
    &[Binding::read("dy", FLOAT), Binding::read("ids", U32), Binding::in_place("d_table", F32)],
);

pub(super) fn gather_rows(gpu: &Arc<Gpu>, op: &GatherRows<'_>) -> Result<()> {
    let (count, columns) = (op.out.rows(), op.x.cols());
    let scalars = GatherRowsScalars { rows: word(count), columns: word(columns), sources: word(op.x.rows()) };
    let tensors = [Some(op.x), Some(op.index), Some(op.out)];
    warps(gpu, &GATHER_ROWS, &tensors, scalars, count, Reads::Once)
}

pub(super) fn combine(gpu: &Arc<Gpu>, op: &Combine<'_>) -> Result<()> {
    let (count, k, (lo, hi)) = (op.out.rows(), op.slots.cols(), op.leaves);
    let window = op.window.unwrap_or(Window { period: count, from: 0, to: count });
    let (levels, stack) = tree_stack(hi - lo, k);
    let scalars = CombineScalars {
        columns: word(op.out.cols()),
        slots: word(op.x.rows()),
        k: word(k),
        leaf_begin: word(lo),
        leaf_end: word(hi),
        levels,
        window_period: word(window.period),
        window_begin: word(window.from),
        window_end: word(window.to),
    };
    let tensors = [Some(op.x), Some(op.slots), op.ids, op.add[0], op.add[1], Some(op.out)];
    let shared = stack + 4 * (5 * word(k) + 1);
    gpu.launch(Launch { shared, ..Launch::new(&COMBINE, scalars, &tensors, count, THREADS) })
}

pub(super) fn embedding_grad(gpu: &Arc<Gpu>, op: &EmbeddingGrad<'_>) -> Result<()> {
    let [groups, vocabulary, columns] = [0, 1, 2].map(|i| op.d_table.shape()[i]);
    let scalars = EmbeddingGradScalars {
        columns: word(columns),
        vocabulary: word(vocabulary),
        group_tokens: word(op.ids.len() / groups),
    };
    let slices = columns.div_ceil(RUN * THREADS as usize);
    let tensors = [Some(op.dy), Some(op.ids), Some(op.d_table)];
    threads(gpu, &EMBEDDING_GRAD, &tensors, scalars, op.ids.len() * slices * THREADS as usize)
}
