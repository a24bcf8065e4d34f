//! The passes over the input: amaxes of squares, blocks along rows, blocks along columns, transposed columns.

use std::ops::Range;

use rayon::prelude::*;

use super::Source;
use super::groups::{Block, Groups};
use crate::host::memory::min_rows;
use crate::host::simd;
use crate::numerics::blocks::{self, Format};
use crate::numerics::e4m3;

/// The amaxes of the square blocks of stacked matrices.
pub(super) struct Squares {
    amax: Vec<f32>,
    block: usize,
    /// Rows of a matrix.
    rows: usize,
    /// Blocks of a matrix, down and across.
    grid: [usize; 2],
}

impl Squares {
    pub(super) fn new(x: &Source<'_>, groups: &Groups, block: usize) -> Squares {
        let rows = groups.rows() / groups.len().max(1);
        let grid = [rows.div_ceil(block), x.cols.div_ceil(block)];
        let mut amax = vec![0.0f32; groups.len() * grid[0] * grid[1]];
        let bands: Vec<Block> = (0..groups.len()).flat_map(|group| groups.blocks_of(group, block)).collect();
        amax.par_chunks_mut(grid[1].max(1)).zip(bands).for_each_init(Vec::new, |scratch, (amax, band)| {
            simd::with(
                x.simd,
                #[inline(always)]
                || {
                    for row in band.rows {
                        let values = x.values.row(row, x.cols, scratch);
                        for (amax, values) in amax.iter_mut().zip(values.chunks(block)) {
                            *amax = amax.max(blocks::amax(values));
                        }
                    }
                },
            );
        });
        Squares { amax, block, rows, grid }
    }

    /// The amax around an element.
    #[inline(always)]
    fn at(&self, row: usize, col: usize) -> f32 {
        let down = row / self.rows * self.grid[0] + row % self.rows / self.block;
        self.amax[down * self.grid[1] + col / self.block]
    }

    /// Writes the scales, one for a square.
    pub(super) fn store<F: Format>(&self, format: &F, scales: &mut [F::Scale]) {
        for (scale, &amax) in scales.iter_mut().zip(&self.amax) {
            *scale = format.scale(amax).0;
        }
    }

    /// Writes the scales of the transposed matrices, one for a square.
    pub(super) fn store_transposed<F: Format>(&self, format: &F, scales: &mut [F::Scale]) {
        let [down, across] = self.grid;
        for (i, scale) in scales.iter_mut().enumerate() {
            let (matrix, place) = (i / (down * across), i % (down * across));
            let (col, row) = (place / down, place % down);
            *scale = format.scale(self.amax[(matrix * down + row) * across + col]).0;
        }
    }
}

/// Blocks along the first `rows` rows. Without `scales` only the codes are written.
pub(super) fn rows<F: Format>(
    x: &Source<'_>,
    rows: usize,
    format: &F,
    squares: Option<&Squares>,
    codes: &mut [u8],
    scales: Option<&mut [F::Scale]>,
) {
    let (bytes, per_row) = (x.cols / F::PER_BYTE, x.cols.div_ceil(F::BLOCK));
    let scales = pieces(scales, per_row, rows);
    let pairs = codes.par_chunks_mut(bytes.max(1)).zip(scales).enumerate().with_min_len(min_rows(x.cols));
    pairs.for_each_init(Vec::new, |scratch, (row, (codes, mut scales))| {
        simd::with(
            x.simd,
            #[inline(always)]
            || {
                let values = x.values.row(row, x.cols, scratch);
                let blocks = values.chunks(F::BLOCK).zip(codes.chunks_mut(F::BLOCK / F::PER_BYTE));
                for (i, (values, codes)) in blocks.enumerate() {
                    let amax = match squares {
                        Some(squares) => squares.at(row, i * F::BLOCK),
                        None => blocks::amax(values),
                    };
                    let (scale, factor) = format.scale(amax);
                    format.encode(values, factor, (row * per_row + i) as u64, codes);
                    if let Some(scales) = &mut scales {
                        scales[i] = scale;
                    }
                }
            },
        );
    });
}

/// e4m3 blocks along the columns, stored row by row: codes `[padded, cols]`, scales `[padded / block, cols]`.
pub(super) fn columns<F: Format>(
    x: &Source<'_>,
    blocks: &[Block],
    format: &F,
    squares: Option<&Squares>,
    codes: &mut [u8],
    scales: &mut [F::Scale],
) {
    let cols = x.cols.max(1);
    let bands = codes.par_chunks_mut(F::BLOCK * cols).zip(scales.par_chunks_mut(cols)).zip(blocks);
    bands.for_each_init(
        || (vec![0.0; x.cols], vec![0.0; x.cols]),
        |(row, factors), ((codes, scales), block)| {
            simd::with(
                x.simd,
                #[inline(always)]
                || {
                    column_amaxes(x, block, 0..x.cols, squares, row, factors);
                    for (scale, factor) in scales.iter_mut().zip(factors.iter_mut()) {
                        (*scale, *factor) = format.scale(*factor);
                    }
                    codes.fill(0);
                    for (r, codes) in block.rows.clone().zip(codes.chunks_mut(cols)) {
                        x.values.load(r * x.cols, row);
                        encode_row(row, factors, codes);
                    }
                },
            );
        },
    );
}

/// Columns that one thread takes at a time in [`transposed`]: a cache line of codes while they wait to be turned.
const STRIPE: usize = 64;

/// e4m3 blocks along the columns, stored column by column: codes `[cols, padded]`, scales `[cols, blocks]`.
/// Without `scales` only the codes are written.
pub(super) fn transposed<F: Format>(
    x: &Source<'_>,
    blocks: &[Block],
    format: &F,
    squares: Option<&Squares>,
    codes: &mut [u8],
    scales: Option<&mut [F::Scale]>,
) {
    let padded = codes.len() / x.cols.max(1);
    let per_col = blocks.len();
    let scales = pieces(scales, STRIPE * per_col, x.cols.div_ceil(STRIPE));
    let stripes = codes.par_chunks_mut((STRIPE * padded).max(1)).zip(scales).enumerate();
    stripes.for_each(|(stripe, (codes, mut scales))| {
        let cols = stripe * STRIPE..x.cols.min((stripe + 1) * STRIPE);
        let (mut row, mut factors) = ([0.0; STRIPE], [0.0; STRIPE]);
        let (row, factors) = (&mut row[..cols.len()], &mut factors[..cols.len()]);
        let mut turned = vec![[0; STRIPE]; F::BLOCK];
        simd::with(
            x.simd,
            #[inline(always)]
            || {
                for block in blocks {
                    column_amaxes(x, block, cols.clone(), squares, row, factors);
                    for (col, factor) in factors.iter_mut().enumerate() {
                        let (scale, value) = format.scale(*factor);
                        *factor = value;
                        if let Some(scales) = &mut scales {
                            scales[col * per_col + block.at.start / F::BLOCK] = scale;
                        }
                    }
                    for (r, codes) in block.rows.clone().zip(&mut turned) {
                        x.values.load(r * x.cols + cols.start, row);
                        encode_row(row, factors, codes);
                    }
                    for (col, codes) in codes.chunks_mut(padded).enumerate() {
                        let codes = &mut codes[block.at.clone()];
                        codes[block.rows.len()..].fill(0);
                        for (code, turned) in codes.iter_mut().zip(&turned[..block.rows.len()]) {
                            *code = turned[col];
                        }
                    }
                }
            },
        );
    });
}

/// The amax of each column of a block, or of the square around it.
#[inline(always)]
fn column_amaxes(
    x: &Source<'_>,
    block: &Block,
    cols: Range<usize>,
    squares: Option<&Squares>,
    row: &mut [f32],
    amaxes: &mut [f32],
) {
    if let Some(squares) = squares {
        for (amax, col) in amaxes.iter_mut().zip(cols) {
            *amax = squares.at(block.rows.start, col);
        }
        return;
    }
    amaxes.fill(0.0);
    for r in block.rows.clone() {
        x.values.load(r * x.cols + cols.start, row);
        for (amax, &v) in amaxes.iter_mut().zip(row.iter()) {
            *amax = f32::from_bits(amax.to_bits().max(blocks::magnitude(v)));
        }
    }
}

#[inline(always)]
fn encode_row(values: &[f32], factors: &[f32], codes: &mut [u8]) {
    for ((code, &v), &factor) in codes.iter_mut().zip(values).zip(factors) {
        *code = e4m3::from_f32(v * factor);
    }
}

/// `count` pieces of `size` elements, or as many times nothing.
fn pieces<T>(slice: Option<&mut [T]>, size: usize, count: usize) -> Vec<Option<&mut [T]>> {
    let mut pieces: Vec<_> = slice.into_iter().flat_map(|s| s.chunks_mut(size.max(1))).map(Some).take(count).collect();
    pieces.resize_with(count, || None);
    pieces
}
