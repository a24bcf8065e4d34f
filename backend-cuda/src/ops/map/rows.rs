//! Rows moved by index: gather, combine, and the gradient of an embedding.

use std::sync::Arc;

use dropless_core::ops::{Combine, EmbeddingGrad, GatherRows, Window};
use dropless_core::{DType, Result};

use super::reduce::tree_stack;
use super::{RUN, Reads, RowWise, THREADS, rows, threads};
use crate::device::{Gpu, word};
use crate::kernel::{Binding, F32, FLOAT, Kernel, Launch, PRELUDE, RUNS, TREE, U32, params};

params!(
    /// Extents; `sources`: the rows of x.
    GatherRowsParams { rows, columns, sources }
);

/// Reads and writes each row that has an index once.
pub(crate) static GATHER_ROWS: Kernel = Kernel {
    name: "gather_rows",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/gather_rows.cu")],
    params: GatherRowsParams::FIELDS,
    tensors: &[
        Binding::read("x", &[DType::F32, DType::Bf16, DType::U32]),
        Binding::read("index", U32),
        Binding::write("out", &[DType::F32, DType::Bf16, DType::U32]),
    ],
    maps: 0,
    constants: &[],
};

params!(
    /// Extents, the leaves of the tree, and the rows to write within each period; `slots`: the rows of x; `levels`: room
    /// on the stack.
    CombineParams { columns, slots, k, leaf_begin, leaf_end, levels, window_period, window_begin, window_end }
);

/// Reads each row that is named once, and writes the sums once.
pub(crate) static COMBINE: Kernel = Kernel {
    name: "combine",
    files: &[PRELUDE, RUNS, TREE, include_str!("../../../../kernels/combine.cu")],
    params: CombineParams::FIELDS,
    tensors: &[
        Binding::read("x", FLOAT),
        Binding::read("slots", U32),
        Binding::read("ids", U32).optional(),
        Binding::read("first", FLOAT).optional(),
        Binding::read("second", FLOAT).optional(),
        Binding::write("out", FLOAT),
    ],
    maps: 0,
    constants: &[],
};

params!(
    /// Extents.
    EmbeddingGradParams { columns, vocabulary, group_tokens }
);

/// Reads each gradient once, and reads and writes the rows of the table that occur once. Besides, the block of each token
/// reads the ids of its group, up to the one before with the same id or all.
pub(crate) static EMBEDDING_GRAD: Kernel = Kernel {
    name: "embedding_grad",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/embedding_grad.cu")],
    params: EmbeddingGradParams::FIELDS,
    tensors: &[Binding::read("dy", FLOAT), Binding::read("ids", U32), Binding::in_place("d_table", F32)],
    maps: 0,
    constants: &[],
};

impl RowWise for GatherRows<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&GATHER_ROWS];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let (count, columns) = (self.out.rows(), self.x.cols());
        let params = GatherRowsParams { rows: word(count), columns: word(columns), sources: word(self.x.rows()) };
        let tensors = [Some(self.x), Some(self.index), Some(self.out)];
        rows(gpu, &GATHER_ROWS, &tensors, params.words(), count, Reads::Once)
    }
}

impl RowWise for Combine<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&COMBINE];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let (count, k, (lo, hi)) = (self.out.rows(), self.slots.cols(), self.leaves);
        let window = self.window.unwrap_or(Window { period: count, from: 0, to: count });
        let (levels, stack) = tree_stack(hi - lo, k);
        let params = CombineParams {
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
        gpu.launch(Launch {
            kernel: &COMBINE,
            tensors: &[Some(self.x), Some(self.slots), self.ids, self.add[0], self.add[1], Some(self.out)],
            constants: &[],
            params: params.words(),
            maps: &[],
            blocks: count as u64,
            threads: THREADS,
            shared: stack + 4 * (5 * word(k) + 1),
        })
    }
}

impl RowWise for EmbeddingGrad<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&EMBEDDING_GRAD];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let [groups, vocabulary, columns] = [0, 1, 2].map(|i| self.d_table.shape()[i]);
        let params = EmbeddingGradParams {
            columns: word(columns),
            vocabulary: word(vocabulary),
            group_tokens: word(self.ids.len() / groups),
        };
        let slices = columns.div_ceil(RUN * THREADS as usize);
        let tensors = [Some(self.dy), Some(self.ids), Some(self.d_table)];
        threads(gpu, &EMBEDDING_GRAD, &tensors, params.words(), self.ids.len() * slices * THREADS as usize)
    }
}
