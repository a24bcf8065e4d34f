//! Block quantization on the host. NUMERICS.md, "Block formats".
//!
//! Rows, column blocks and stripes of transposed columns are three passes over the input, each parallel over pieces of
//! its own result.

mod groups;
mod passes;

use bytemuck::{Zeroable, cast_slice_mut};
use rayon::prelude::*;

use super::Simd;
use super::memory::{self, Floats, Gathered, min_rows};
use crate::error::Result;
use crate::numerics::blocks::{self, Format, Fp8Block, Mxfp8, Nvfp4};
use crate::ops::{BlockFormat, Checked, ColumnBlocks, GroupQuantize, RowBlocks};
use groups::Groups;

const OP: &str = "group_quantize";

pub(super) fn run(op: &Checked<GroupQuantize<'_>>, simd: Simd) -> Result<()> {
    let (values, cols) = (memory::input(OP, op.x)?, op.x.cols());
    let gather = memory::input_opt(OP, op.gather)?;
    let offsets = memory::input_opt(OP, op.offsets)?;
    let groups = match &offsets {
        Some(offsets) => Groups::ragged(offsets.u32(), op.rows()),
        None => Groups::stacked(op.x.shape()[0], op.x.shape()[1]),
    };
    let gathered = gather.as_ref().map(|gather| Gathered::of(values.floats(), cols, &gather.u32()[..groups.rows()]));
    let x = Source { values: gathered.as_ref().map_or(values.floats(), Gathered::floats), cols, simd };
    match op.format {
        BlockFormat::Mxfp8 { floor } => quantize(op, &x, &groups, &Mxfp8 { floor }),
        BlockFormat::Fp8Block { f32_scale } => quantize(op, &x, &groups, &Fp8Block { f32_scale }),
        BlockFormat::Nvfp4 { stochastic } => {
            let amax = x.amax(groups.rows());
            if let Some(out) = op.amax {
                memory::output(OP, out)?.f32()[0] = amax;
            }
            quantize(op, &x, &groups, &Nvfp4::new(amax, stochastic))
        }
    }
}

/// The input: `cols` values a row.
struct Source<'a> {
    values: Floats<'a>,
    cols: usize,
    simd: Simd,
}

impl Source<'_> {
    /// The amax of the first `rows` rows.
    fn amax(&self, rows: usize) -> f32 {
        let row = |scratch: &mut Vec<f32>, r| blocks::amax(self.values.row(r, self.cols, scratch));
        (0..rows).into_par_iter().with_min_len(min_rows(self.cols)).map_init(Vec::new, row).reduce(|| 0.0, f32::max)
    }
}

fn quantize<F: Format>(op: &GroupQuantize<'_>, x: &Source<'_>, groups: &Groups, format: &F) -> Result<()> {
    let squares = op.square.then(|| passes::Squares::new(x, groups, F::BLOCK));
    // FP8 blocks store one scale for a square, the others one for each of its rows or columns.
    let grid = squares.as_ref().filter(|_| matches!(op.format, BlockFormat::Fp8Block { .. }));
    if let Some(RowBlocks { codes, scales }) = op.row {
        let (mut codes, mut scales) = (memory::output(OP, codes)?, memory::output(OP, scales)?);
        let scales = cast_slice_mut(scales.bytes());
        if let Some(grid) = grid {
            grid.store(format, scales);
        }
        passes::rows(x, groups.rows(), format, squares.as_ref(), codes.u8(), grid.is_none().then_some(scales));
    }
    if let Some(ColumnBlocks { codes, scales, offsets }) = op.column {
        if let Some(offsets) = offsets {
            groups.store_padded(F::BLOCK, memory::output(OP, offsets)?.u32())?;
        }
        let (mut codes, mut scales) = (memory::output(OP, codes)?, memory::output(OP, scales)?);
        let (codes, scales) = (codes.u8(), cast_slice_mut(scales.bytes()));
        let blocks = groups.padded(F::BLOCK);
        if !matches!(op.format, BlockFormat::Fp8Block { .. }) {
            passes::columns(x, &blocks, format, squares.as_ref(), codes, scales);
        } else if let Some(grid) = grid {
            grid.store_transposed(format, scales);
            let matrix = (codes.len() / groups.len().max(1)).max(1);
            for (group, codes) in codes.chunks_mut(matrix).enumerate() {
                passes::transposed(x, &groups.blocks_of(group, F::BLOCK), format, Some(grid), codes, None);
            }
        } else {
            let mut of_columns = vec![F::Scale::zeroed(); x.cols * blocks.len()];
            passes::transposed(x, &blocks, format, None, codes, Some(&mut of_columns));
            for (block, scales) in scales.chunks_mut(x.cols.max(1)).take(blocks.len()).enumerate() {
                let of_block = of_columns.iter().skip(block).step_by(blocks.len());
                scales.iter_mut().zip(of_block).for_each(|(scale, of_column)| *scale = *of_column);
            }
        }
    }
    Ok(())
}
