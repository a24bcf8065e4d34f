//! Matrix products on slices, one thread. NUMERICS.md, "Matrix products".
//!
//! The same bits as [`mma`], element by element, by vector arithmetic: [`matrix_unit`] and [`fused`] hold the kernels,
//! [`blocks`] the loops and the packing around them, [`element`] their element types, [`lanes`] and [`x86`] the vector
//! operations.

mod blocks;
mod element;
mod fused;
mod lanes;
mod matrix_unit;
#[cfg(target_arch = "x86_64")]
mod x86;

use self::blocks::{Blocks, Factor, Kernel};
use self::element::Element;
use self::fused::Fused;
use self::lanes::{Lanes, Plain};
use self::matrix_unit::MatrixUnit;
use super::Simd;
use crate::numerics::NumericModel;
use crate::numerics::mma::{self, Tensorcore};

/// The values or codes of a matrix.
#[derive(Clone, Copy, Debug)]
pub(super) enum Elements<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    E4m3(&'a [u8]),
}

/// One dimension of a matrix: where its entry i lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis<'a> {
    /// Elements from one entry to the next.
    pub(super) stride: usize,
    /// Entry i is entry `gather[i]` of the memory.
    pub(super) gather: Option<&'a [u32]>,
}

impl Axis<'_> {
    /// Entries one after the other.
    pub(super) const fn strided(stride: usize) -> Self {
        Axis { stride, gather: None }
    }

    #[inline(always)]
    fn at(self, i: usize) -> usize {
        self.gather.map_or(i, |rows| rows[i] as usize) * self.stride
    }
}

/// A factor: `rows` rows, whose element along the chain is `data[offset + row.at(i) + chain.at(t)]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix<'a> {
    pub(super) data: Elements<'a>,
    pub(super) offset: usize,
    pub(super) rows: usize,
    pub(super) row: Axis<'a>,
    pub(super) chain: Axis<'a>,
}

impl Matrix<'_> {
    #[inline(always)]
    fn at(&self, i: usize, t: usize) -> usize {
        self.offset + self.row.at(i) + self.chain.at(t)
    }
}

/// `c[i * ldc + j]` continues with `a(i, 0) b(j, 0) + ... + a(i, k - 1) b(j, k - 1)` for every row i of a and j of b.
/// A caller fills c with zeros for a fresh chain. Both factors have one element type; f32 values follow the `F32`
/// model. A chain may be continued in several calls if each but the last has a multiple of 32 terms.
pub(super) fn product(
    model: NumericModel,
    simd: Simd,
    a: Matrix<'_>,
    b: Matrix<'_>,
    k: usize,
    c: &mut [f32],
    ldc: usize,
) {
    const BF16: Tensorcore = Tensorcore::HOPPER_BF16;
    const E4M3: Tensorcore = Tensorcore::HOPPER_E4M3;
    let fused = Fused;
    let bf16 = MatrixUnit::<{ BF16.step }, { BF16.fraction_bits }, { BF16.result_bits }>;
    let e4m3 = MatrixUnit::<{ E4M3.step }, { E4M3.fraction_bits }, { E4M3.result_bits }>;
    match (a.data, b.data) {
        (Elements::F32(x), Elements::F32(y)) => vectorized(fused, simd, (x, a), (y, b), k, c, ldc),
        (Elements::Bf16(x), Elements::Bf16(y)) => match Tensorcore::of_bf16(model) {
            None => vectorized(fused, simd, (x, a), (y, b), k, c, ldc),
            Some(BF16) => vectorized(bf16, simd, (x, a), (y, b), k, c, ldc),
            Some(_) => specification((x, a), (y, b), k, c, ldc, |x, y, acc| mma::dot_bf16(model, x, y, acc)),
        },
        (Elements::E4m3(x), Elements::E4m3(y)) => match Tensorcore::of_e4m3(model) {
            None => vectorized(fused, simd, (x, a), (y, b), k, c, ldc),
            Some(E4M3) => vectorized(e4m3, simd, (x, a), (y, b), k, c, ldc),
            Some(_) => specification((x, a), (y, b), k, c, ldc, |x, y, acc| mma::dot_e4m3(model, x, y, acc)),
        },
        _ => unreachable!("the factors of a product have one element type"),
    }
}

/// A factor's elements and their places.
type Part<'a, T> = (&'a [T], Matrix<'a>);

/// The kernel with the vector instructions asked for.
fn vectorized<T: Element, K: Kernel>(
    kernel: K,
    simd: Simd,
    (x, a): Part<'_, T>,
    (y, b): Part<'_, T>,
    k: usize,
    c: &mut [f32],
    ldc: usize,
) {
    let blocks = Blocks { kernel, a: Factor { data: x, place: a }, b: Factor { data: y, place: b }, k, c, ldc };
    match simd {
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512 if let Some(lanes) = x86::Avx512::new() => lanes.vectorize(blocks),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 if let Some(lanes) = x86::Avx2::new() => lanes.vectorize(blocks),
        _ => Plain.vectorize(blocks),
    }
}

/// Element by element, for a matrix unit without a kernel.
fn specification<T: Element>(
    (x, a): Part<'_, T>,
    (y, b): Part<'_, T>,
    k: usize,
    c: &mut [f32],
    ldc: usize,
    dot: impl Fn(&[T], &[T], f32) -> f32,
) {
    let (a, b) = (Factor { data: x, place: a }, Factor { data: y, place: b });
    let columns: Vec<_> = (0..b.place.rows).map(|j| b.along(j, 0..k)).collect();
    for (i, c) in c.chunks_mut(ldc).take(a.place.rows).enumerate() {
        let row = a.along(i, 0..k);
        for (acc, column) in c.iter_mut().zip(&columns) {
            *acc = dot(&row, column, *acc);
        }
    }
}

#[cfg(test)]
mod tests;
