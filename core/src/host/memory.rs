//! Host buffers: 32-bit words behind a lock, viewed as the tensor's element type.
//!
//! An op takes a read lock for each input and a write lock for each output. The checks of the ops make sure that no
//! output shares a buffer with another operand, so that one op never takes a lock twice for writing.

mod floats;

pub(super) use floats::{Floats, FloatsMut, RowMut};

use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit, cast_slice, cast_slice_mut};
use parking_lot::{RecursiveRwLock, RecursiveRwLockReadGuard, RecursiveRwLockWriteGuard};

use crate::error::{Error, Result};
use crate::tensor::{DType, Memory, Tensor};

/// The words of a buffer.
#[derive(Debug)]
pub(super) struct Buffer(RecursiveRwLock<Vec<u32>>);

/// What a new buffer holds, so that a read of memory that nothing wrote shows: a NaN in every float type.
const UNDEFINED: u32 = 0xFFFF_FFFF;

/// A new tensor.
pub(super) fn alloc(dtype: DType, shape: &[usize], memory: Memory, available: u64) -> Result<Tensor> {
    let bytes = shape.iter().try_fold(dtype.size() as u64, |n, &d| n.checked_mul(d as u64)).unwrap_or(u64::MAX);
    let capacity = |available, hint: &str| Error::Capacity { op: "alloc", needed: bytes, available, hint: hint.into() };
    if bytes > available {
        return Err(capacity(available, "a smaller batch, more chunks, or more memory"));
    }
    let words = usize::try_from(bytes.div_ceil(4)).map_err(|_| capacity(available, "a 64-bit machine"))?;
    let mut buffer = Vec::new();
    // How much is left, the system does not tell.
    buffer.try_reserve_exact(words).map_err(|_| capacity(0, "the system refused; a smaller batch, or more chunks"))?;
    buffer.resize(words, UNDEFINED);
    Ok(Tensor::from_storage(Arc::new(Buffer(RecursiveRwLock::new(buffer))), shape, dtype, memory))
}

fn buffer<'a>(op: &'static str, tensor: &'a Tensor) -> Result<&'a Buffer> {
    tensor.storage::<Buffer>().ok_or(Error::ForeignTensor { op, backend: "host" })
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

/// Locks a tensor for reading. Two inputs may share a buffer, also while another thread waits to write it.
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
    /// The elements as numbers of their size.
    fn view<T: AnyBitPattern>(&self) -> &[T] {
        debug_assert_eq!(self.dtype.size(), size_of::<T>());
        &cast_slice(&self.words)[self.from..self.from + self.len]
    }

    /// The elements of an F32 tensor.
    pub(super) fn f32(&self) -> &[f32] {
        debug_assert_eq!(self.dtype, DType::F32);
        self.view()
    }

    /// The elements of a U32 tensor.
    pub(super) fn u32(&self) -> &[u32] {
        debug_assert_eq!(self.dtype, DType::U32);
        self.view()
    }

    /// The codes of a Bf16 tensor.
    pub(super) fn bf16(&self) -> &[u16] {
        debug_assert_eq!(self.dtype, DType::Bf16);
        self.view()
    }

    /// The codes of a tensor of 1-byte elements.
    pub(super) fn u8(&self) -> &[u8] {
        self.view()
    }

    /// The elements of an F32 or Bf16 tensor.
    pub(super) fn floats(&self) -> Floats<'_> {
        if self.dtype == DType::F32 { Floats::F32(self.f32()) } else { Floats::Bf16(self.bf16()) }
    }

    /// The bytes of the view.
    pub(super) fn bytes(&self) -> &[u8] {
        let size = self.dtype.size();
        &cast_slice(&self.words)[self.from * size..(self.from + self.len) * size]
    }
}

impl Output<'_> {
    /// The elements as numbers of their size.
    fn view<T: AnyBitPattern + NoUninit>(&mut self) -> &mut [T] {
        debug_assert_eq!(self.dtype.size(), size_of::<T>());
        &mut cast_slice_mut(&mut self.words)[self.from..self.from + self.len]
    }

    /// The elements of an F32 tensor.
    pub(super) fn f32(&mut self) -> &mut [f32] {
        debug_assert_eq!(self.dtype, DType::F32);
        self.view()
    }

    /// The elements of a U32 tensor.
    pub(super) fn u32(&mut self) -> &mut [u32] {
        debug_assert_eq!(self.dtype, DType::U32);
        self.view()
    }

    /// The codes of a Bf16 tensor.
    pub(super) fn bf16(&mut self) -> &mut [u16] {
        debug_assert_eq!(self.dtype, DType::Bf16);
        self.view()
    }

    /// The codes of a tensor of 1-byte elements.
    pub(super) fn u8(&mut self) -> &mut [u8] {
        self.view()
    }

    /// The elements of an F32 or Bf16 tensor.
    pub(super) fn floats(&mut self) -> FloatsMut<'_> {
        if self.dtype == DType::F32 { FloatsMut::F32(self.f32()) } else { FloatsMut::Bf16(self.bf16()) }
    }

    /// The bytes of the view.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        let size = self.dtype.size();
        &mut cast_slice_mut(&mut self.words)[self.from * size..(self.from + self.len) * size]
    }
}

/// Rows that one thread should take at least, so that the work outweighs handing it out.
pub(super) fn min_rows(cols: usize) -> usize {
    (4096 / cols.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_memory_is_nan_in_every_float_type() {
        for dtype in [DType::F32, DType::Bf16] {
            let tensor = alloc(dtype, &[3], Memory::Device, 1 << 10).unwrap();
            let mut values = [0.0; 3];
            input("test", &tensor).unwrap().floats().load(0, &mut values);
            assert!(values.iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn views_start_at_elements_of_every_size() {
        let tensor = alloc(DType::Bf16, &[5], Memory::Device, 1 << 10).unwrap();
        output("test", &tensor).unwrap().bf16().copy_from_slice(&[1, 2, 3, 4, 5]);
        assert_eq!(input("test", &tensor.slice(1, 4).unwrap()).unwrap().bf16(), [2, 3, 4]);
        assert_eq!(input("test", &tensor.slice(3, 5).unwrap()).unwrap().bytes(), [4, 0, 5, 0]);
    }

    #[test]
    fn sizes_past_64_bits_and_past_the_limit_are_capacity_errors() {
        for shape in [&[usize::MAX, 3][..], &[usize::MAX, usize::MAX], &[257]] {
            let error = alloc(DType::F32, shape, Memory::Device, 1024).unwrap_err();
            assert!(matches!(error, Error::Capacity { available: 1024, .. }), "{error}");
        }
        let error = alloc(DType::F32, &[1 << 60], Memory::Device, u64::MAX).unwrap_err();
        assert!(matches!(error, Error::Capacity { available: 0, .. }), "{error}");
        alloc(DType::F32, &[256], Memory::Device, 1024).unwrap();
    }

    #[test]
    fn a_tensor_of_another_backend_is_refused() {
        let foreign = Tensor::from_storage(Arc::new(()), &[1], DType::F32, Memory::Device);
        assert!(matches!(input("test", &foreign), Err(Error::ForeignTensor { op: "test", backend: "host" })));
    }

    #[test]
    fn a_dropped_row_is_rounded_into_its_place_only() {
        let mut codes = [7u16; 6];
        let mut scratch = Vec::new();
        let mut out = FloatsMut::Bf16(&mut codes);
        out.row(1, 2, &mut scratch).copy_from_slice(&[1.0, 1.0 + 1.0 / 128.0 + 1.0 / 256.0]);
        assert_eq!(codes, [7, 7, 0x3F80, 0x3F82, 7, 7]);
    }
}
