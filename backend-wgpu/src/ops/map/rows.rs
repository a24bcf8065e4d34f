//! Rows moved by index: gather, combine, and the gradient of an embedding.

use dropless_core::launch::Program;
use dropless_core::ops::{Combine, EmbeddingGrad, GatherRows, Window};
use dropless_core::{DType, Result, Tensor};

use super::{RowWise, elements};
use crate::dispatch::Stream;
use crate::shader::{Binding, F32, FLOAT, FORMATS, PRELUDE, Shader, TREE, U32, scalars, word};

scalars!(
    /// Extents; `sources`: the rows of x.
    pub(crate) struct GatherRowsScalars { elements, columns, sources }
);

pub(crate) static GATHER_ROWS: Shader<GatherRowsScalars> = Shader::new(
    "gather_rows",
    &[PRELUDE, FORMATS, include_str!("../../../../shaders/gather_rows.wgsl")],
    &[
        Binding::read("x", &[DType::F32, DType::Bf16, DType::U32]),
        Binding::read("index", U32),
        Binding::write("out", &[DType::F32, DType::Bf16, DType::U32]),
    ],
);

scalars!(
    /// Extents, the leaves of the tree, and the rows to write within each period; `slots`: the rows of x.
    pub(crate) struct CombineScalars { elements, columns, slots, k, leaf_begin, leaf_end, window_period, window_begin, window_end }
);

pub(crate) static COMBINE: Shader<CombineScalars> = Shader::new(
    "combine",
    &[PRELUDE, FORMATS, TREE, include_str!("../../../../shaders/combine.wgsl")],
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
    /// Extents; `elements`: groups times columns.
    pub(crate) struct EmbeddingGradScalars { elements, columns, vocabulary, group_tokens }
);

pub(crate) static EMBEDDING_GRAD: Shader<EmbeddingGradScalars> = Shader::new(
    "embedding_grad",
    &[PRELUDE, FORMATS, include_str!("../../../../shaders/embedding_grad.wgsl")],
    &[Binding::read("dy", FLOAT), Binding::read("ids", U32), Binding::in_place("d_table", F32)],
);

/// Queues the gathering of rows for an op that wants them in order.
pub(in crate::ops) fn gather_rows(stream: &Stream, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<()> {
    GatherRows { x, index, out }.queue(stream)
}

impl RowWise for GatherRows<'_> {
    const SHADERS: &'static [&'static Program] = &[&GATHER_ROWS.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.out.len();
        let scalars =
            GatherRowsScalars { elements: word(count), columns: word(self.x.cols()), sources: word(self.x.rows()) };
        elements(stream, &GATHER_ROWS, &[Some(self.x), Some(self.index), Some(self.out)], scalars, count)
    }
}

impl RowWise for Combine<'_> {
    const SHADERS: &'static [&'static Program] = &[&COMBINE.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let (count, rows) = (self.out.len(), self.out.rows());
        let window = self.window.unwrap_or(Window { period: rows, from: 0, to: rows });
        let scalars = CombineScalars {
            elements: word(count),
            columns: word(self.out.cols()),
            slots: word(self.x.rows()),
            k: word(self.slots.cols()),
            leaf_begin: word(self.leaves.0),
            leaf_end: word(self.leaves.1),
            window_period: word(window.period),
            window_begin: word(window.from),
            window_end: word(window.to),
        };
        let tensors = [Some(self.x), Some(self.slots), self.ids, self.add[0], self.add[1], Some(self.out)];
        elements(stream, &COMBINE, &tensors, scalars, count)
    }
}

impl RowWise for EmbeddingGrad<'_> {
    const SHADERS: &'static [&'static Program] = &[&EMBEDDING_GRAD.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let [groups, vocabulary, columns] = [0, 1, 2].map(|i| self.d_table.shape()[i]);
        let count = groups * columns;
        let scalars = EmbeddingGradScalars {
            elements: word(count),
            columns: word(columns),
            vocabulary: word(vocabulary),
            group_tokens: word(self.ids.len() / groups),
        };
        elements(stream, &EMBEDDING_GRAD, &[Some(self.dy), Some(self.ids), Some(self.d_table)], scalars, count)
    }
}
