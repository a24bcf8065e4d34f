//! Matrix products on slices, one thread. NUMERICS.md, "Matrix products".
//!
//! The same bits as [`mma`](crate::numerics::mma), element by element.

use super::Simd;
use crate::numerics::{NumericModel, mma};

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
    _simd: Simd,
    a: Matrix<'_>,
    b: Matrix<'_>,
    k: usize,
    c: &mut [f32],
    ldc: usize,
) {
    fn column<T: Copy>(data: &[T], matrix: &Matrix<'_>, i: usize, k: usize) -> Vec<T> {
        (0..k).map(|t| data[matrix.at(i, t)]).collect()
    }
    for i in 0..a.rows {
        for j in 0..b.rows {
            let acc = &mut c[i * ldc + j];
            *acc = match (a.data, b.data) {
                (Elements::F32(x), Elements::F32(y)) => mma::dot_f32(&column(x, &a, i, k), &column(y, &b, j, k), *acc),
                (Elements::Bf16(x), Elements::Bf16(y)) => {
                    mma::dot_bf16(model, &column(x, &a, i, k), &column(y, &b, j, k), *acc)
                }
                (Elements::E4m3(x), Elements::E4m3(y)) => {
                    mma::dot_e4m3(model, &column(x, &a, i, k), &column(y, &b, j, k), *acc)
                }
                _ => unreachable!("the factors of a product have one element type"),
            };
        }
    }
}
