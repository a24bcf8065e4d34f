//! Host buffers: 32-bit words behind a lock, viewed as the tensor's element type.
//!
//! An op takes a read lock for each input and a write lock for each output. The checks of the ops make sure that no
//! output shares a buffer with another operand, so that one op never takes a lock twice for writing.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use parking_lot::{RecursiveRwLock, RecursiveRwLockReadGuard, RecursiveRwLockWriteGuard};

use crate::error::{Error, Result};
use crate::numerics::bf16;
use crate::tensor::{DType, Memory, Tensor};

/// The words of a buffer.
#[derive(Debug)]
pub(super) struct Buffer(RecursiveRwLock<Vec<u32>>);

/// What a new buffer holds, so that a read of memory that nothing wrote shows: a NaN in every float type.
const UNDEFINED: u32 = 0xFFFF_FFFF;

/// A new tensor.
pub(super) fn alloc(dtype: DType, shape: &[usize], memory: Memory, available: u64) -> Result<Tensor> {
    let bytes = shape.iter().try_fold(dtype.size() as u64, |n, &d| n.checked_mul(d as u64)).unwrap_or(u64::MAX);
    let capacity = |hint: &str| Error::Capacity { op: "alloc", needed: bytes, available, hint: hint.into() };
    if bytes > available {
        return Err(capacity("a smaller batch, more chunks, or more memory"));
    }
    let words = usize::try_from(bytes.div_ceil(4)).map_err(|_| capacity("a 64-bit machine"))?;
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(words).map_err(|_| capacity("the system refused"))?;
    buffer.resize(words, UNDEFINED);
    Ok(Tensor::from_storage(Arc::new(Buffer(RecursiveRwLock::new(buffer))), shape, dtype, memory))
}

fn buffer<'a>(op: &'static str, tensor: &'a Tensor) -> Result<&'a Buffer> {
    tensor.storage().downcast_ref::<Buffer>().ok_or(Error::ForeignTensor { op, backend: "host" })
}

/// A tensor locked for reading.
pub(super) struct Input<'a> {
    words: RecursiveRwLockReadGuard<'a, Vec<u32>>,
    from: usize,
    len: usize,
    dtype: DType,
}

/// A tensor locked for writing.
pub(super) struct Output<'a> {
    words: RecursiveRwLockWriteGuard<'a, Vec<u32>>,
    from: usize,
    len: usize,
    dtype: DType,
}

/// Locks a tensor for reading.
pub(super) fn input<'a>(op: &'static str, tensor: &'a Tensor) -> Result<Input<'a>> {
    let words = buffer(op, tensor)?.0.read();
    Ok(Input { words, from: tensor.offset(), len: tensor.len(), dtype: tensor.dtype() })
}

/// Locks a tensor for reading, if there is one.
pub(super) fn input_opt<'a>(op: &'static str, tensor: Option<&'a Tensor>) -> Result<Option<Input<'a>>> {
    tensor.map(|t| input(op, t)).transpose()
}

/// Locks a tensor for writing.
pub(super) fn output<'a>(op: &'static str, tensor: &'a Tensor) -> Result<Output<'a>> {
    let words = buffer(op, tensor)?.0.write();
    Ok(Output { words, from: tensor.offset(), len: tensor.len(), dtype: tensor.dtype() })
}

/// Locks a tensor for writing, if there is one.
pub(super) fn output_opt<'a>(op: &'static str, tensor: Option<&'a Tensor>) -> Result<Option<Output<'a>>> {
    tensor.map(|t| output(op, t)).transpose()
}

impl Input<'_> {
    /// The elements of an F32 tensor.
    pub(super) fn f32(&self) -> &[f32] {
        debug_assert_eq!(self.dtype, DType::F32);
        &cast_slice(&self.words)[self.from..self.from + self.len]
    }

    /// The elements of a U32 tensor.
    pub(super) fn u32(&self) -> &[u32] {
        debug_assert_eq!(self.dtype, DType::U32);
        &self.words[self.from..self.from + self.len]
    }

    /// The codes of a Bf16 tensor.
    pub(super) fn bf16(&self) -> &[u16] {
        debug_assert_eq!(self.dtype, DType::Bf16);
        &cast_slice(&self.words)[self.from..self.from + self.len]
    }

    /// The codes of a tensor of 1-byte elements.
    pub(super) fn u8(&self) -> &[u8] {
        debug_assert_eq!(self.dtype.size(), 1);
        &cast_slice(&self.words)[self.from..self.from + self.len]
    }

    /// The elements of an F32 or Bf16 tensor.
    pub(super) fn floats(&self) -> Floats<'_> {
        match self.dtype {
            DType::F32 => Floats::F32(self.f32()),
            _ => Floats::Bf16(self.bf16()),
        }
    }

    /// The bytes of the view.
    pub(super) fn bytes(&self) -> &[u8] {
        let size = self.dtype.size();
        &cast_slice(&self.words)[self.from * size..(self.from + self.len) * size]
    }
}

impl Output<'_> {
    /// The elements of an F32 tensor.
    pub(super) fn f32(&mut self) -> &mut [f32] {
        debug_assert_eq!(self.dtype, DType::F32);
        &mut cast_slice_mut(&mut self.words)[self.from..self.from + self.len]
    }

    /// The elements of a U32 tensor.
    pub(super) fn u32(&mut self) -> &mut [u32] {
        debug_assert_eq!(self.dtype, DType::U32);
        &mut self.words[self.from..self.from + self.len]
    }

    /// The codes of a Bf16 tensor.
    pub(super) fn bf16(&mut self) -> &mut [u16] {
        debug_assert_eq!(self.dtype, DType::Bf16);
        &mut cast_slice_mut(&mut self.words)[self.from..self.from + self.len]
    }

    /// The codes of a tensor of 1-byte elements.
    pub(super) fn u8(&mut self) -> &mut [u8] {
        debug_assert_eq!(self.dtype.size(), 1);
        &mut cast_slice_mut(&mut self.words)[self.from..self.from + self.len]
    }

    /// The elements of an F32 or Bf16 tensor.
    pub(super) fn floats(&mut self) -> FloatsMut<'_> {
        match self.dtype {
            DType::F32 => FloatsMut::F32(self.f32()),
            _ => FloatsMut::Bf16(self.bf16()),
        }
    }

    /// The bytes of the view.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        let size = self.dtype.size();
        &mut cast_slice_mut(&mut self.words)[self.from * size..(self.from + self.len) * size]
    }
}

/// f32 or bf16 elements, read as f32.
#[derive(Clone, Copy, Debug)]
pub(super) enum Floats<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
}

impl<'a> Floats<'a> {
    /// Number of elements.
    #[inline(always)]
    pub(super) fn len(self) -> usize {
        match self {
            Floats::F32(x) => x.len(),
            Floats::Bf16(x) => x.len(),
        }
    }

    /// Copies the elements from `from` on into `out`.
    #[inline(always)]
    pub(super) fn load(self, from: usize, out: &mut [f32]) {
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
    pub(super) fn add_to(self, from: usize, sums: &mut [f32]) {
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
    pub(super) fn span<'b>(self, from: usize, len: usize, scratch: &'b mut Vec<f32>) -> &'b [f32]
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
    pub(super) fn row<'b>(self, r: usize, cols: usize, scratch: &'b mut Vec<f32>) -> &'b [f32]
    where
        'a: 'b,
    {
        self.span(r * cols, cols, scratch)
    }
}

/// f32 or bf16 elements, written from f32 with one rounding.
#[derive(Debug)]
pub(super) enum FloatsMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [u16]),
}

impl<'a> FloatsMut<'a> {
    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        match self {
            FloatsMut::F32(out) => out.len(),
            FloatsMut::Bf16(out) => out.len(),
        }
    }

    /// The elements in pieces of `len`, the last one shorter, for several threads to write.
    pub(super) fn pieces(self, len: usize) -> Vec<FloatsMut<'a>> {
        match self {
            FloatsMut::F32(out) => out.chunks_mut(len.max(1)).map(FloatsMut::F32).collect(),
            FloatsMut::Bf16(out) => out.chunks_mut(len.max(1)).map(FloatsMut::Bf16).collect(),
        }
    }

    /// Row r of rows of `cols` elements, to be written whole: the slice itself, or `scratch`, which is rounded into place
    /// when the row is dropped.
    #[inline(always)]
    pub(super) fn row<'b>(&'b mut self, r: usize, cols: usize, scratch: &'b mut Vec<f32>) -> RowMut<'b> {
        match self {
            FloatsMut::F32(out) => RowMut::F32(&mut out[r * cols..(r + 1) * cols]),
            FloatsMut::Bf16(out) => {
                scratch.resize(cols, 0.0);
                RowMut::Bf16 { codes: &mut out[r * cols..(r + 1) * cols], values: scratch }
            }
        }
    }

    /// The first `len` elements.
    pub(super) fn first(self, len: usize) -> FloatsMut<'a> {
        match self {
            FloatsMut::F32(out) => FloatsMut::F32(&mut out[..len]),
            FloatsMut::Bf16(out) => FloatsMut::Bf16(&mut out[..len]),
        }
    }

    /// Writes `values` from element `from` on.
    #[inline(always)]
    pub(super) fn store(&mut self, from: usize, values: &[f32]) {
        match self {
            FloatsMut::F32(out) => out[from..from + values.len()].copy_from_slice(values),
            FloatsMut::Bf16(out) => round_into(&mut out[from..from + values.len()], values),
        }
    }
}

/// A row under construction; its elements before the first write are undefined.
#[derive(Debug)]
pub(super) enum RowMut<'a> {
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

/// Rows that one thread should take at least, so that the work outweighs handing it out.
pub(super) fn min_rows(cols: usize) -> usize {
    (4096 / cols.max(1)).max(1)
}
