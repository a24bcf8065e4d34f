//! Views of f32 or bf16 elements. Ops compute in f32: a bf16 element is widened exactly when read, and a result is rounded
//! once when written.

use std::ops::{Deref, DerefMut};

use crate::numerics::bf16;

/// f32 or bf16 elements, read as f32.
#[derive(Clone, Copy, Debug)]
pub(in crate::host) enum Floats<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
}

impl<'a> Floats<'a> {
    /// Number of elements.
    #[inline(always)]
    pub(in crate::host) fn len(self) -> usize {
        match self {
            Floats::F32(x) => x.len(),
            Floats::Bf16(x) => x.len(),
        }
    }

    /// Copies the elements from `from` on into `out`.
    #[inline(always)]
    pub(in crate::host) fn load(self, from: usize, out: &mut [f32]) {
        match self {
            Floats::F32(x) => out.copy_from_slice(&x[from..from + out.len()]),
            Floats::Bf16(x) => {
                let codes = &x[from..from + out.len()];
                for (o, &c) in out.iter_mut().zip(codes) {
                    *o = bf16::to_f32(c);
                }
            }
        }
    }

    /// Adds the elements from `from` on to `sums`.
    #[inline(always)]
    pub(in crate::host) fn add_to(self, from: usize, sums: &mut [f32]) {
        match self {
            Floats::F32(x) => {
                for (sum, x) in sums.iter_mut().zip(&x[from..]) {
                    *sum += x;
                }
            }
            Floats::Bf16(x) => {
                for (sum, &code) in sums.iter_mut().zip(&x[from..]) {
                    *sum += bf16::to_f32(code);
                }
            }
        }
    }

    /// The `len` elements from `from` on: the slice itself, or converted in `scratch`.
    #[inline(always)]
    pub(in crate::host) fn span<'b>(self, from: usize, len: usize, scratch: &'b mut Vec<f32>) -> &'b [f32]
    where
        'a: 'b,
    {
        match self {
            Floats::F32(x) => &x[from..from + len],
            Floats::Bf16(_) => {
                scratch.resize(len, 0.0);
                self.load(from, scratch);
                scratch
            }
        }
    }

    /// Row r of rows of `cols` elements, as [`span`](Floats::span).
    #[inline(always)]
    pub(in crate::host) fn row<'b>(self, r: usize, cols: usize, scratch: &'b mut Vec<f32>) -> &'b [f32]
    where
        'a: 'b,
    {
        self.span(r * cols, cols, scratch)
    }
}

/// The rows of these numbers, one after the other; +0 for one that is not there.
pub(in crate::host) fn gathered<T: Copy + Default>(values: &[T], cols: usize, index: &[u32]) -> Vec<T> {
    let mut out = vec![T::default(); index.len() * cols];
    for (out, &row) in out.chunks_mut(cols.max(1)).zip(index) {
        let from = row as usize * cols;
        if let Some(row) = values.get(from..from + cols) {
            out.copy_from_slice(row);
        }
    }
    out
}

/// Gathered f32 or bf16 elements.
#[derive(Debug)]
pub(in crate::host) enum Gathered {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

impl Gathered {
    /// See [`gathered`].
    pub(in crate::host) fn of(values: Floats<'_>, cols: usize, index: &[u32]) -> Gathered {
        match values {
            Floats::F32(values) => Gathered::F32(gathered(values, cols, index)),
            Floats::Bf16(codes) => Gathered::Bf16(gathered(codes, cols, index)),
        }
    }

    pub(in crate::host) fn floats(&self) -> Floats<'_> {
        match self {
            Gathered::F32(values) => Floats::F32(values),
            Gathered::Bf16(codes) => Floats::Bf16(codes),
        }
    }
}

/// f32 or bf16 elements, written from f32 with one rounding.
#[derive(Debug)]
pub(in crate::host) enum FloatsMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [u16]),
}

impl<'a> FloatsMut<'a> {
    /// Number of elements.
    pub(in crate::host) fn len(&self) -> usize {
        match self {
            FloatsMut::F32(out) => out.len(),
            FloatsMut::Bf16(out) => out.len(),
        }
    }

    /// The elements in pieces of `len`, the last one shorter, for several threads to write.
    pub(in crate::host) fn pieces(self, len: usize) -> Vec<FloatsMut<'a>> {
        match self {
            FloatsMut::F32(out) => out.chunks_mut(len.max(1)).map(FloatsMut::F32).collect(),
            FloatsMut::Bf16(out) => out.chunks_mut(len.max(1)).map(FloatsMut::Bf16).collect(),
        }
    }

    /// Row r of rows of `cols` elements, to be written whole: the slice itself, or `scratch`, which is rounded into place
    /// when the row is dropped.
    #[inline(always)]
    pub(in crate::host) fn row<'b>(&'b mut self, r: usize, cols: usize, scratch: &'b mut Vec<f32>) -> RowMut<'b> {
        match self {
            FloatsMut::F32(out) => RowMut::F32(&mut out[r * cols..(r + 1) * cols]),
            FloatsMut::Bf16(out) => {
                scratch.resize(cols, 0.0);
                RowMut::Bf16 { codes: &mut out[r * cols..(r + 1) * cols], values: scratch }
            }
        }
    }

    /// The first `len` elements.
    pub(in crate::host) fn first(self, len: usize) -> FloatsMut<'a> {
        match self {
            FloatsMut::F32(out) => FloatsMut::F32(&mut out[..len]),
            FloatsMut::Bf16(out) => FloatsMut::Bf16(&mut out[..len]),
        }
    }

    /// Writes `values` from element `from` on.
    #[inline(always)]
    pub(in crate::host) fn store(&mut self, from: usize, values: &[f32]) {
        match self {
            FloatsMut::F32(out) => out[from..from + values.len()].copy_from_slice(values),
            FloatsMut::Bf16(out) => round_into(&mut out[from..from + values.len()], values),
        }
    }
}

/// A row under construction; its elements before the first write are undefined.
#[derive(Debug)]
pub(in crate::host) enum RowMut<'a> {
    F32(&'a mut [f32]),
    Bf16 { codes: &'a mut [u16], values: &'a mut [f32] },
}

impl Deref for RowMut<'_> {
    type Target = [f32];

    #[inline(always)]
    fn deref(&self) -> &[f32] {
        match self {
            RowMut::F32(values) | RowMut::Bf16 { values, .. } => values,
        }
    }
}

impl DerefMut for RowMut<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            RowMut::F32(values) | RowMut::Bf16 { values, .. } => values,
        }
    }
}

impl Drop for RowMut<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if let RowMut::Bf16 { codes, values } = self {
            round_into(codes, values);
        }
    }
}

#[inline(always)]
fn round_into(codes: &mut [u16], values: &[f32]) {
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = bf16::from_f32(value);
    }
}
