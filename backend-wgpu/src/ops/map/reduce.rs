//! Sums over tokens, shards and parameters.

use dropless_core::Result;
use dropless_core::launch::Program;
use dropless_core::ops::{SumRows, SumSquares, TreeSum};

use super::{RowWise, elements, workgroups};
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

impl RowWise for SumRows<'_> {
    const SHADERS: &'static [&'static Program] = &[&SUM_ROWS.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let (columns, groups) = (self.x.cols(), self.out.rows());
        let (sums, group_rows) = (groups * columns, self.x.rows() / groups);
        let scalars = SumRowsScalars { elements: word(sums), columns: word(columns), group_rows: word(group_rows) };
        elements(stream, &SUM_ROWS, &[Some(self.x), Some(self.out)], scalars, sums)
    }
}

impl RowWise for SumSquares<'_> {
    const SHADERS: &'static [&'static Program] = &[&SUM_SQUARES.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.x.rows();
        let scalars = SumSquaresScalars { rows: word(count), columns: word(self.x.cols()) };
        workgroups(stream, &SUM_SQUARES, &[Some(self.x), Some(self.out)], scalars, count)
    }
}

impl RowWise for TreeSum<'_> {
    const SHADERS: &'static [&'static Program] = &[&TREE_SUM.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.out.len();
        let parts = self.parts.shape().first().copied().unwrap_or(0);
        let scalars = TreeSumScalars { elements: word(count), parts: word(parts) };
        elements(stream, &TREE_SUM, &[Some(self.parts), Some(self.out)], scalars, count)
    }
}
