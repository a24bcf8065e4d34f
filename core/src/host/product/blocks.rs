//! Cache blocking and packing around the kernels.
//!
//! `DEPTH` chain elements of a block of columns and a block of rows are brought into the order in which the kernel
//! reads them; the accumulators wait in c in between, where a chain can pause without loss.

use std::cell::RefCell;

use super::element::Element;
use super::lanes::{Job, Lanes};
use super::{Axis, Matrix};
use crate::numerics::mma::Tensorcore;

/// Chain elements packed at a time, a multiple of every step: two vectors' columns of them fit the first-level cache.
const DEPTH: usize = 128;
/// Rows of the left factor packed at a time.
const ROWS: usize = 128;
/// Rows of the right factor (columns of c) packed at a time; with the left block they fit the second-level cache.
const COLS: usize = 256;
/// The most rows and columns of a tile.
const TILE: [usize; 2] = [8, 32];

/// Some rows of the left factor, element by element along the chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left<'a> {
    pub(super) values: &'a [f32],
    /// Two equal i16 each.
    pub(super) exponents: &'a [u32],
}

/// Two vectors' columns of the right factor, element by element along the chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Right<'a> {
    pub(super) values: &'a [f32],
    pub(super) exponents: &'a [i16],
}

/// An arithmetic for tiles of c.
pub(super) trait Kernel: Copy {
    /// Chain elements are packed in multiples of this, filled up with zeros.
    const STEP: usize;
    /// The matrix unit that the kernel follows, if any; it needs the packed exponents.
    const UNIT: Option<Tensorcore>;

    /// The most rows of a tile, one of 1, 2, 4, 6, 8.
    fn rows<V: Lanes>() -> usize;

    /// Continues the chains in c, R rows of two vectors each. `exact(row, column, step, acc)` is the specification of a
    /// step.
    fn tile<V: Lanes, const R: usize>(
        self,
        lanes: V,
        left: Left<'_>,
        right: Right<'_>,
        c: &mut [f32],
        exact: &dyn Fn(usize, usize, usize, f32) -> f32,
    );
}

/// A factor with its elements' type known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factor<'a, T> {
    pub(super) data: &'a [T],
    pub(super) place: Matrix<'a>,
}

impl<T: Element> Factor<'_, T> {
    /// `out[t * width + r]` becomes element `from + t` of row `first + r`; zeros where the factor has no more.
    #[inline(always)]
    fn transpose(&self, first: usize, rows: usize, from: usize, depth: usize, width: usize, out: &mut [T]) {
        let place = &self.place;
        if rows < width || out.len() > depth * width {
            out.fill(T::default());
        }
        if let (Axis { stride: 1, gather: None }, true) = (place.row, rows > 0) {
            for (t, out) in out.chunks_exact_mut(width).take(depth).enumerate() {
                let at = place.at(first, from + t);
                out[..rows].copy_from_slice(&self.data[at..at + rows]);
            }
            return;
        }
        for r in 0..rows {
            let column = out[r..].iter_mut().step_by(width).take(depth);
            if let Axis { stride: 1, gather: None } = place.chain {
                let at = place.at(first + r, from);
                column.zip(&self.data[at..at + depth]).for_each(|(out, &x)| *out = x);
            } else {
                column.enumerate().for_each(|(t, out)| *out = self.data[place.at(first + r, from + t)]);
            }
        }
    }

    /// Some elements of a row.
    pub(super) fn along(&self, row: usize, chain: std::ops::Range<usize>) -> Vec<T> {
        chain.map(|t| self.data[self.place.at(row, t)]).collect()
    }
}

/// The packed factors, kept by each thread from product to product.
#[derive(Debug, Default)]
struct Packed {
    left: Vec<f32>,
    left_exponents: Vec<u32>,
    right: Vec<f32>,
    right_exponents: Vec<i16>,
}

thread_local! {
    static PACKED: RefCell<Packed> = RefCell::default();
}

/// A product, to be run with the vector instructions of choice.
pub(super) struct Blocks<'a, T, K> {
    pub(super) kernel: K,
    pub(super) a: Factor<'a, T>,
    pub(super) b: Factor<'a, T>,
    pub(super) k: usize,
    pub(super) c: &'a mut [f32],
    pub(super) ldc: usize,
}

impl<T: Element, K: Kernel> Job for Blocks<'_, T, K> {
    #[inline(always)]
    fn run<V: Lanes>(mut self, lanes: V) {
        // Taken out rather than borrowed: a closure would be compiled without the vector instructions.
        let mut packed = PACKED.take();
        for col in (0..self.b.place.rows).step_by(COLS) {
            for from in (0..self.k).step_by(DEPTH) {
                let depth = DEPTH.min(self.k - from);
                packed.pack_right::<V, T, K>(&self.b, col, from, depth);
                for row in (0..self.a.place.rows).step_by(ROWS) {
                    packed.pack_left::<V, T, K>(&self.a, row, from, depth);
                    self.tiles(lanes, &packed, [row, col], from, depth);
                }
            }
        }
        PACKED.set(packed);
    }
}

/// The rows of the tiles that `rows` rows are cut into.
#[inline(always)]
fn heights(rows: usize, most: usize) -> impl Iterator<Item = usize> {
    let mut left = rows;
    std::iter::from_fn(move || {
        let height = [8, 6, 4, 2, 1].into_iter().find(|&height| height <= left.min(most))?;
        left -= height;
        Some(height)
    })
}

impl Packed {
    #[inline(always)]
    fn pack_left<V: Lanes, T: Element, K: Kernel>(&mut self, a: &Factor<'_, T>, row: usize, from: usize, depth: usize) {
        let rows = ROWS.min(a.place.rows - row);
        let padded = depth.next_multiple_of(K::STEP);
        self.left.resize(ROWS * DEPTH, 0.0);
        self.left_exponents.resize(ROWS * DEPTH, 0);
        let mut codes = [T::default(); TILE[0] * DEPTH];
        let mut first = 0;
        for height in heights(rows, K::rows::<V>()) {
            let codes = &mut codes[..padded * height];
            a.transpose(row + first, height, from, depth, height, codes);
            let place = first * padded..(first + height) * padded;
            self.left[place.clone()].iter_mut().zip(&*codes).for_each(|(out, &code)| *out = code.value());
            if K::UNIT.is_some() {
                let pair = |e: i16| u32::from(e.cast_unsigned()) * 0x1_0001;
                let exponents = &mut self.left_exponents[place];
                exponents.iter_mut().zip(&*codes).for_each(|(out, &code)| *out = pair(code.exponent()));
            }
            first += height;
        }
    }

    #[inline(always)]
    fn pack_right<V: Lanes, T: Element, K: Kernel>(
        &mut self,
        b: &Factor<'_, T>,
        col: usize,
        from: usize,
        depth: usize,
    ) {
        let width = 2 * V::N;
        let cols = COLS.min(b.place.rows - col);
        let padded = depth.next_multiple_of(K::STEP);
        self.right.resize(COLS * DEPTH, 0.0);
        self.right_exponents.resize(COLS * DEPTH, 0);
        let mut codes = [T::default(); TILE[1] * DEPTH];
        for first in (0..cols).step_by(width) {
            let codes = &mut codes[..padded * width];
            b.transpose(col + first, width.min(cols - first), from, depth, width, codes);
            let place = first * padded..(first + width) * padded;
            self.right[place.clone()].iter_mut().zip(&*codes).for_each(|(out, &code)| *out = code.value());
            if K::UNIT.is_some() {
                let exponents = &mut self.right_exponents[place];
                exponents.iter_mut().zip(&*codes).for_each(|(out, &code)| *out = code.exponent());
            }
        }
    }
}

impl<T: Element, K: Kernel> Blocks<'_, T, K> {
    /// The tiles of one packed block of rows with one of columns.
    #[inline(always)]
    fn tiles<V: Lanes>(&mut self, lanes: V, packed: &Packed, [row, col]: [usize; 2], from: usize, depth: usize) {
        let width = 2 * V::N;
        let rows = ROWS.min(self.a.place.rows - row);
        let cols = COLS.min(self.b.place.rows - col);
        let padded = depth.next_multiple_of(K::STEP);
        let mut tile = [0.0; TILE[0] * TILE[1]];
        for first_col in (0..cols).step_by(width) {
            let place = first_col * padded..(first_col + width) * padded;
            let right = Right { values: &packed.right[place.clone()], exponents: &packed.right_exponents[place] };
            let used = width.min(cols - first_col);
            let mut first_row = 0;
            for height in heights(rows, K::rows::<V>()) {
                let place = first_row * padded..(first_row + height) * padded;
                let left = Left { values: &packed.left[place.clone()], exponents: &packed.left_exponents[place] };
                let (a, b, end) = (&self.a, &self.b, from + depth);
                let exact = |r: usize, j: usize, step: usize, acc: f32| match K::UNIT {
                    Some(unit) if j < used => {
                        let start = from + step * K::STEP;
                        let chain = start..end.min(start + K::STEP);
                        let x = a.along(row + first_row + r, chain.clone());
                        T::step(unit, &x, &b.along(col + first_col + j, chain), acc)
                    }
                    _ => acc,
                };
                let at = |r: usize| (row + first_row + r) * self.ldc + col + first_col;
                let tile = &mut tile[..height * width];
                for (r, tile) in tile.chunks_exact_mut(width).enumerate() {
                    tile[..used].copy_from_slice(&self.c[at(r)..at(r) + used]);
                    tile[used..].fill(0.0);
                }
                let kernel = self.kernel;
                match height {
                    8 if K::rows::<V>() >= 8 => kernel.tile::<V, 8>(lanes, left, right, tile, &exact),
                    6 if K::rows::<V>() >= 6 => kernel.tile::<V, 6>(lanes, left, right, tile, &exact),
                    4 if K::rows::<V>() >= 4 => kernel.tile::<V, 4>(lanes, left, right, tile, &exact),
                    2 => kernel.tile::<V, 2>(lanes, left, right, tile, &exact),
                    _ => kernel.tile::<V, 1>(lanes, left, right, tile, &exact),
                }
                for (r, tile) in tile.chunks_exact(width).enumerate() {
                    self.c[at(r)..at(r) + used].copy_from_slice(&tile[..used]);
                }
                first_row += height;
            }
        }
    }
}
