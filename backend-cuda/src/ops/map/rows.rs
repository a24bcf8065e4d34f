//! Rows moved by index: gather, combine, and the gradient of an embedding.

use std::sync::Arc;

use dropless_core::launch::Program;
use dropless_core::ops::{Combine, EmbeddingGrad, GatherRows, Window};
use dropless_core::{DType, Result};

use super::reduce::tree_stack;
use super::{RUN, Reads, RowWise, THREADS, threads, warps};
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

impl RowWise for GatherRows<'_> {
    const KERNELS: &'static [&'static Program] = &[&GATHER_ROWS.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let (count, columns) = (self.out.rows(), self.x.cols());
        let scalars = GatherRowsScalars { rows: word(count), columns: word(columns), sources: word(self.x.rows()) };
        let tensors = [Some(self.x), Some(self.index), Some(self.out)];
        warps(gpu, &GATHER_ROWS, &tensors, scalars, count, Reads::Once)
    }
}

impl RowWise for Combine<'_> {
    const KERNELS: &'static [&'static Program] = &[&COMBINE.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let (count, k, (lo, hi)) = (self.out.rows(), self.slots.cols(), self.leaves);
        let window = self.window.unwrap_or(Window { period: count, from: 0, to: count });
        let (levels, stack) = tree_stack(hi - lo, k);
        let scalars = CombineScalars {
            columns: word(self.out.cols()),
            slots: word(self.x.rows()),
            k: word(k),
            leaf_begin: word(lo),
            leaf_end: word(hi),
            levels,
            window_period: word(window.period),
            window_begin: word(window.from),
            window_end: word(window.to),
        };
        let tensors = [Some(self.x), Some(self.slots), self.ids, self.add[0], self.add[1], Some(self.out)];
        let shared = stack + 4 * (5 * word(k) + 1);
        gpu.launch(Launch { shared, ..Launch::new(&COMBINE, scalars, &tensors, count, THREADS) })
    }
}

impl RowWise for EmbeddingGrad<'_> {
    const KERNELS: &'static [&'static Program] = &[&EMBEDDING_GRAD.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let [groups, vocabulary, columns] = [0, 1, 2].map(|i| self.d_table.shape()[i]);
        let scalars = EmbeddingGradScalars {
            columns: word(columns),
            vocabulary: word(vocabulary),
            group_tokens: word(self.ids.len() / groups),
        };
        let slices = columns.div_ceil(RUN * THREADS as usize);
        let tensors = [Some(self.dy), Some(self.ids), Some(self.d_table)];
        threads(gpu, &EMBEDDING_GRAD, &tensors, scalars, self.ids.len() * slices * THREADS as usize)
    }
}
