//! Sums over tokens, shards and parameters.

use dropless_core::Result;
use dropless_core::ops::{SumRows, SumSquares, TreeSum};

use super::{RowWise, elements, rows};
use crate::dispatch::{Stream, word};
use crate::shader::{Binding, F32, FLOAT, FORMATS, PRELUDE, ROW, Shader, TREE, params};

params!(
    /// Extents; `elements`: groups times columns.
    SumRowsParams { elements, columns, group_rows }
);

pub(crate) static SUM_ROWS: Shader = Shader {
    name: "sum_rows",
    files: &[PRELUDE, FORMATS, include_str!("../../../../shaders/sum_rows.wgsl")],
    params: SumRowsParams::FIELDS,
    bindings: &[Binding::read("x", FLOAT), Binding::write("out", F32)],
    constants: &[],
};

params!(
    /// Extents.
    SumSquaresParams { rows, columns }
);

pub(crate) static SUM_SQUARES: Shader = Shader {
    name: "sum_squares",
    files: &[PRELUDE, FORMATS, ROW, include_str!("../../../../shaders/sum_squares.wgsl")],
    params: SumSquaresParams::FIELDS,
    bindings: &[Binding::read("x", FLOAT), Binding::write("out", F32)],
    constants: &[],
};

params!(
    /// Extents; `elements`: those of one part.
    TreeSumParams { elements, parts }
);

pub(crate) static TREE_SUM: Shader = Shader {
    name: "tree_sum",
    files: &[PRELUDE, FORMATS, TREE, include_str!("../../../../shaders/tree_sum.wgsl")],
    params: TreeSumParams::FIELDS,
    bindings: &[Binding::read("parts", F32), Binding::write("out", F32)],
    constants: &[],
};

impl RowWise for SumRows<'_> {
    const SHADERS: &'static [&'static Shader] = &[&SUM_ROWS];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let (columns, groups) = (self.x.cols(), self.out.rows());
        let (sums, group_rows) = (groups * columns, self.x.rows() / groups);
        let params = SumRowsParams { elements: word(sums), columns: word(columns), group_rows: word(group_rows) };
        elements(stream, &SUM_ROWS, &[Some(self.x), Some(self.out)], params.words(), sums)
    }
}

impl RowWise for SumSquares<'_> {
    const SHADERS: &'static [&'static Shader] = &[&SUM_SQUARES];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.x.rows();
        let params = SumSquaresParams { rows: word(count), columns: word(self.x.cols()) };
        rows(stream, &SUM_SQUARES, &[Some(self.x), Some(self.out)], params.words(), count)
    }
}

impl RowWise for TreeSum<'_> {
    const SHADERS: &'static [&'static Shader] = &[&TREE_SUM];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.out.len();
        let parts = self.parts.shape().first().copied().unwrap_or(0);
        let params = TreeSumParams { elements: word(count), parts: word(parts) };
        elements(stream, &TREE_SUM, &[Some(self.parts), Some(self.out)], params.words(), count)
    }
}
