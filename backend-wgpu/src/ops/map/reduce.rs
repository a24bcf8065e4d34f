//! Sums over tokens, shards and parameters.

use dropless_core::Result;
use dropless_core::ops::{SumRows, SumSquares, TreeSum};

use super::{elements, workgroups};
use crate::dispatch::Stream;
use crate::shader::{Binding, F32, FLOAT, FORMATS, PRELUDE, ROW, Shader, TREE, scalars, word};

scalars!(
    /// Extents; `elements`: groups times columns.
    pub(crate) struct SumRowsScalars { elements, columns, group_rows }
);

pub(crate) static SUM_ROWS: Shader<SumRowsScalars> = Shader::new(
    "sum_rows",
    &[PRELUDE, FORMATS, include_str!("../../../../shaders/sum_rows.wgsl")],
    &[Binding::read("x", FLOAT), Binding::write("out", F32)],
);

scalars!(
    /// Extents.
    pub(crate) struct SumSquaresScalars { rows, columns }
);

pub(crate) static SUM_SQUARES: Shader<SumSquaresScalars> = Shader::new(
    "sum_squares",
    &[PRELUDE, FORMATS, ROW, include_str!("../../../../shaders/sum_squares.wgsl")],
    &[Binding::read("x", FLOAT), Binding::write("out", F32)],
);

scalars!(
    /// Extents; `elements`: those of one part.
    pub(crate) struct TreeSumScalars { elements, parts }
);

pub(crate) static TREE_SUM: Shader<TreeSumScalars> = Shader::new(
    "tree_sum",
    &[PRELUDE, FORMATS, TREE, include_str!("../../../../shaders/tree_sum.wgsl")],
    &[Binding::read("parts", F32), Binding::write("out", F32)],
);

pub(super) fn sum_rows(stream: &Stream, op: &SumRows<'_>) -> Result<()> {
    let (columns, groups) = (op.x.cols(), op.out.rows());
    let (sums, group_rows) = (groups * columns, op.x.rows() / groups);
    let scalars = SumRowsScalars { elements: word(sums), columns: word(columns), group_rows: word(group_rows) };
    elements(stream, &SUM_ROWS, &[Some(op.x), Some(op.out)], scalars, sums)
}

pub(super) fn sum_squares(stream: &Stream, op: &SumSquares<'_>) -> Result<()> {
    let count = op.x.rows();
    let scalars = SumSquaresScalars { rows: word(count), columns: word(op.x.cols()) };
    workgroups(stream, &SUM_SQUARES, &[Some(op.x), Some(op.out)], scalars, count)
}

pub(super) fn tree_sum(stream: &Stream, op: &TreeSum<'_>) -> Result<()> {
    let count = op.out.len();
    let parts = op.parts.shape().first().copied().unwrap_or(0);
    let scalars = TreeSumScalars { elements: word(count), parts: word(parts) };
    elements(stream, &TREE_SUM, &[Some(op.parts), Some(op.out)], scalars, count)
}
