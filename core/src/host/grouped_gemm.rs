//! Matrix products over ragged groups on the host. NUMERICS.md, "Matrix products".
//!
//! The output is cut into tiles that lie in one group each; a thread computes a tile from zero in a buffer of its own
//! and stores it, rounded or added, at the end. No chain is ever cut, so the tiles do not show in the bits.
//! A gathered row that is not there is a row of +0.

mod operand;

use rayon::prelude::*;

use self::operand::{Factor, Groups};
use super::Simd;
use super::memory::{FloatsMut, input, output};
use crate::error::Result;
use crate::numerics::{NumericModel, bf16};
use crate::ops::{Checked, GroupedGemm, Product};

const OP: &str = "grouped_gemm";

/// Part of one group's output: rows from `row` on and columns from `col` on, counted within the group.
struct Tile<'a, T> {
    group: usize,
    row: usize,
    col: usize,
    rows: Vec<&'a mut [T]>,
}

pub(super) fn run(op: &Checked<GroupedGemm<'_>>, model: NumericModel, simd: Simd) -> Result<()> {
    let product = op.product();
    let offsets = input(OP, op.offsets)?;
    let groups = Groups::new(offsets.u32(), product.ragged_extent(), op.offsets_block());
    let [a, b] = product.sides;
    let a = Factor::load(op.a, a, &groups, model)?;
    let b = Factor::load(op.b, b, &groups, model)?;
    let work = Work { product, a, b, groups, model, simd, accumulate: op.accumulate };
    match output(OP, op.out)?.floats() {
        FloatsMut::F32(out) => work.run(out),
        FloatsMut::Bf16(out) => work.run(out),
    }
    Ok(())
}

/// A product with its factors, locked for reading.
struct Work<'a> {
    product: Product,
    a: Factor<'a>,
    b: Factor<'a>,
    groups: Groups,
    model: NumericModel,
    simd: Simd,
    accumulate: bool,
}

impl Work<'_> {
    fn run<T: Element>(&self, out: &mut [T]) {
        let Product { m, n, k, .. } = self.product;
        let ragged_chain = self.product.ragged_chain();
        let rows = |group| if ragged_chain { m } else { self.groups.rows(group).len() };
        tiles(out, n, &self.groups, rows).into_par_iter().for_each_init(Vec::new, |result, tile| {
            let chain = if ragged_chain { self.groups.rows(tile.group) } else { 0..k };
            if chain.is_empty() && self.accumulate {
                return;
            }
            let width = tile.rows[0].len();
            result.clear();
            result.resize(tile.rows.len() * width, 0.0);
            if !chain.is_empty() {
                let start = self.groups.rows(tile.group).start;
                let a = self.a.block(tile.group, start, tile.row, tile.rows.len());
                let b = self.b.block(tile.group, start, tile.col, width);
                operand::multiply(self.model, self.simd, &a, &b, chain, result);
            }
            for (row, values) in tile.rows.into_iter().zip(result.chunks(width)) {
                T::store(row, values, self.accumulate);
            }
        });
    }
}

/// Rows and columns of the largest tile: its operands and result fit the second-level cache.
const LARGEST: [usize; 2] = [128, 256];
/// Smaller tiles than this spend their time on packing.
const SMALLEST: [usize; 2] = [32, 64];
/// Tiles that each thread should have at least, so that none waits long for the last.
const TILES_PER_THREAD: usize = 4;

fn tiles<'a, T>(mut out: &'a mut [T], cols: usize, groups: &Groups, rows: impl Fn(usize) -> usize) -> Vec<Tile<'a, T>> {
    let mut tiles = Vec::new();
    if cols == 0 {
        return tiles;
    }
    let [height, width] = tile_shape((0..groups.len()).map(&rows), cols);
    for group in 0..groups.len() {
        let (mine, rest) = out.split_at_mut(rows(group) * cols);
        out = rest;
        for (band, rows) in mine.chunks_mut(height * cols).enumerate() {
            let first = tiles.len();
            let count = rows.len() / cols;
            tiles.extend((0..cols).step_by(width).map(|col| Tile {
                group,
                row: band * height,
                col,
                rows: Vec::with_capacity(count),
            }));
            for row in rows.chunks_mut(cols) {
                for (tile, part) in tiles[first..].iter_mut().zip(row.chunks_mut(width)) {
                    tile.rows.push(part);
                }
            }
        }
    }
    tiles
}

/// Halves the largest tile until every thread has enough of them.
fn tile_shape(rows: impl Iterator<Item = usize> + Clone, cols: usize) -> [usize; 2] {
    let [mut height, mut width] = LARGEST;
    let count = |height: usize, width: usize| {
        rows.clone().map(|rows| rows.div_ceil(height)).sum::<usize>() * cols.div_ceil(width)
    };
    let wanted = TILES_PER_THREAD * rayon::current_num_threads();
    while count(height, width) < wanted {
        if width > SMALLEST[1] && width >= height {
            width /= 2;
        } else if height > SMALLEST[0] {
            height /= 2;
        } else {
            break;
        }
    }
    [height, width]
}

/// An output element.
trait Element: Send + Sized {
    fn store(out: &mut [Self], values: &[f32], accumulate: bool);
}

impl Element for f32 {
    fn store(out: &mut [f32], values: &[f32], accumulate: bool) {
        if accumulate {
            out.iter_mut().zip(values).for_each(|(out, value)| *out += value);
        } else {
            out.copy_from_slice(values);
        }
    }
}

/// bf16 codes, which nothing accumulates into.
impl Element for u16 {
    fn store(out: &mut [u16], values: &[f32], _accumulate: bool) {
        out.iter_mut().zip(values).for_each(|(out, &value)| *out = bf16::from_f32(value));
    }
}
