//! Rows moved by index: gather, combine, and the gradient of an embedding.

use dropless_core::ops::{Combine, EmbeddingGrad, GatherRows, Window};
use dropless_core::{DType, Result};

use super::elements;
use crate::dispatch::Stream;
use crate::shader::{Binding, F32, FLOAT, FORMATS, PRELUDE, Shader, TREE, U32, scalars, word};

scalars!(
    /// Extents.
    pub(crate) struct GatherRowsScalars { elements, columns }
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
    /// Extents, the leaves of the tree, and the rows to write within each period.
    pub(crate) struct CombineScalars { elements, columns, k, leaf_begin, leaf_end, window_period, window_begin, window_end }
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

pub(super) fn gather_rows(stream: &Stream, op: &GatherRows<'_>) -> Result<()> {
    let count = op.out.len();
    let scalars = GatherRowsScalars { elements: word(count), columns: word(op.x.cols()) };
    elements(stream, &GATHER_ROWS, &[Some(op.x), Some(op.index), Some(op.out)], scalars, count)
}

pub(super) fn combine(stream: &Stream, op: &Combine<'_>) -> Result<()> {
    let (count, rows) = (op.out.len(), op.out.rows());
    let window = op.window.unwrap_or(Window { period: rows, from: 0, to: rows });
    let scalars = CombineScalars {
        elements: word(count),
        columns: word(op.out.cols()),
        k: word(op.slots.cols()),
        leaf_begin: word(op.leaves.0),
        leaf_end: word(op.leaves.1),
        window_period: word(window.period),
        window_begin: word(window.from),
        window_end: word(window.to),
    };
    let tensors = [Some(op.x), Some(op.slots), op.ids, op.add[0], op.add[1], Some(op.out)];
    elements(stream, &COMBINE, &tensors, scalars, count)
}

pub(super) fn embedding_grad(stream: &Stream, op: &EmbeddingGrad<'_>) -> Result<()> {
    let [groups, vocabulary, columns] = [0, 1, 2].map(|i| op.d_table.shape()[i]);
    let count = groups * columns;
    let scalars = EmbeddingGradScalars {
        elements: word(count),
        columns: word(columns),
        vocabulary: word(vocabulary),
        group_tokens: word(op.ids.len() / groups),
    };
    elements(stream, &EMBEDDING_GRAD, &[Some(op.dy), Some(op.ids), Some(op.d_table)], scalars, count)
}
