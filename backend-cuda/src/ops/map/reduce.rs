//! Sums over tokens, shards and parameters.

use std::sync::Arc;

use dropless_core::launch::Program;
use dropless_core::numerics::reduce::TOKEN_BLOCK;
use dropless_core::ops::{SumRows, SumSquares, TreeSum};
use dropless_core::{DType, Result, Tensor};

use super::{RUN, Reads, RowWise, THREADS, blocks, threads, warps};
use crate::device::Gpu;
use crate::kernel::{Binding, F32, FLOAT, Kernel, Launch, PRELUDE, RUNS, TOKEN_SUM, TREE, scalars, word};

scalars!(
    /// Extents; `blocks`: of 128 rows, those of all groups.
    pub(crate) struct SumRowsScalars { blocks, columns, group_rows }
);

/// Reads each element once, and writes a sum for each column and 128 rows.
pub(crate) static SUM_ROWS: Kernel<SumRowsScalars> = Kernel::new(
    "sum_rows",
    &[PRELUDE, RUNS, TOKEN_SUM, include_str!("../../../../kernels/sum_rows.cu")],
    &[Binding::read("x", FLOAT), Binding::write("sums", F32)],
);

scalars!(
    /// Extents; `group_blocks`: the blocks of a group; `accumulate`: 1 to add to what is there.
    pub(crate) struct SumBlocksScalars { groups, columns, group_blocks, accumulate }
);

/// Reads each block's sum once.
pub(crate) static SUM_BLOCKS: Kernel<SumBlocksScalars> = Kernel::new(
    "sum_blocks",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/sum_blocks.cu")],
    &[Binding::read("sums", F32), Binding::in_place("out", F32)],
);

scalars!(
    /// Extents.
    pub(crate) struct SumSquaresScalars { rows, columns }
);

/// Reads each element once.
pub(crate) static SUM_SQUARES: Kernel<SumSquaresScalars> = Kernel::new(
    "sum_squares",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/sum_squares.cu")],
    &[Binding::read("x", FLOAT), Binding::write("out", F32)],
);

scalars!(
    /// Extents; `rows`, `columns`: those of one part; `levels`: room on the stack.
    pub(crate) struct TreeSumScalars { rows, columns, parts, levels }
);

/// Reads each part once and writes the sum once.
pub(crate) static TREE_SUM: Kernel<TreeSumScalars> = Kernel::new(
    "tree_sum",
    &[PRELUDE, RUNS, TREE, include_str!("../../../../kernels/tree_sum.cu")],
    &[Binding::read("parts", F32), Binding::write("out", F32)],
);

/// The blocks of a token sum: NUMERICS.md, "Sums".
pub(super) struct Blocks {
    groups: usize,
    columns: usize,
    pub(super) group_rows: usize,
    group_blocks: usize,
}

/// What becomes of the result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// It is overwritten.
    Written,
    /// The sum is added to it.
    AddedTo,
}

impl Blocks {
    pub(super) fn new(rows: usize, columns: usize, groups: usize) -> Blocks {
        let group_rows = rows / groups;
        Blocks { groups, columns, group_rows, group_blocks: group_rows.div_ceil(TOKEN_BLOCK) }
    }

    /// How many, of all groups.
    pub(super) fn count(&self) -> usize {
        self.groups * self.group_blocks
    }

    /// A place for their sums.
    pub(super) fn sums(&self, gpu: &Arc<Gpu>) -> Result<Tensor> {
        gpu.alloc(DType::F32, &[self.count(), self.columns])
    }

    /// Adds the blocks of each group.
    pub(super) fn total(&self, gpu: &Arc<Gpu>, sums: &Tensor, out: &Tensor, target: Target) -> Result<()> {
        let scalars = SumBlocksScalars {
            groups: word(self.groups),
            columns: word(self.columns),
            group_blocks: word(self.group_blocks),
            accumulate: u32::from(target == Target::AddedTo),
        };
        threads(gpu, &SUM_BLOCKS, &[Some(sums), Some(out)], scalars, self.groups * self.columns)
    }
}

impl RowWise for SumRows<'_> {
    const KERNELS: &'static [&'static Program] = &[&SUM_ROWS.program, &SUM_BLOCKS.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let columns = self.x.cols();
        let blocks = Blocks::new(self.x.rows(), columns, self.out.rows());
        let sums = blocks.sums(gpu)?;
        let scalars = SumRowsScalars {
            blocks: word(blocks.count()),
            columns: word(columns),
            group_rows: word(blocks.group_rows),
        };
        let runs = blocks.count() * columns.div_ceil(RUN);
        threads(gpu, &SUM_ROWS, &[Some(self.x), Some(&sums)], scalars, runs)?;
        blocks.total(gpu, &sums, self.out, Target::Written)
    }
}

impl RowWise for SumSquares<'_> {
    const KERNELS: &'static [&'static Program] = &[&SUM_SQUARES.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let count = self.x.rows();
        let scalars = SumSquaresScalars { rows: word(count), columns: word(self.x.cols()) };
        warps(gpu, &SUM_SQUARES, &[Some(self.x), Some(self.out)], scalars, count, Reads::Once)
    }
}

/// Levels of the stack on which `kernels/tree.cuh` sums up to `leaves` leaves of a tree over `width`, and the bytes that
/// a block's stack takes. Without repeated leaves the first term of the height is the number of levels of the tree.
pub(super) fn tree_stack(width: usize, leaves: usize) -> (u32, u32) {
    let depth = usize::BITS - width.saturating_sub(1).leading_zeros();
    let levels = word(leaves.saturating_sub(1)).min(depth + 1);
    (levels, levels * THREADS * 32)
}

impl RowWise for TreeSum<'_> {
    const KERNELS: &'static [&'static Program] = &[&TREE_SUM.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let parts = self.parts.shape().first().copied().unwrap_or(0);
        let (levels, stack) = tree_stack(parts, parts);
        let scalars =
            TreeSumScalars { rows: word(self.out.rows()), columns: word(self.out.cols()), parts: word(parts), levels };
        let (tensors, blocks) = ([Some(self.parts), Some(self.out)], blocks(self.out.len().div_ceil(RUN)));
        let shared = stack + 4 * (word(parts) + 1);
        gpu.launch(Launch { shared, ..Launch::new(&TREE_SUM, scalars, &tensors, blocks, THREADS) })
    }
}
