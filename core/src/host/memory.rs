//! Host buffers: bytes behind a lock, viewed as the tensor's element type.
//!
//! An op takes a read lock for each input and a write lock for each output. The checks of the ops make sure that no
//! output shares a buffer with another operand, so that one op never takes a lock twice for writing.

mod floats;
mod words;

pub(super) use floats::{Floats, FloatsMut, Gathered, RowMut, gathered};

use std::any::Any;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit, cast_slice, cast_slice_mut};
use parking_lot::{RecursiveRwLock, RecursiveRwLockReadGuard, RecursiveRwLockWriteGuard};

use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Memory, Tensor};
use words::{Lent, Words};

/// The memory of a tensor.
#[derive(Debug)]
pub(super) struct Buffer(RecursiveRwLock<Words>);

impl Buffer {
    fn tensor(words: Words, shape: &[usize], dtype: DType, memory: Memory) -> Tensor {
        Tensor::from_storage(Arc::new(Buffer(RecursiveRwLock::new(words))), shape, dtype, memory)
    }
}

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
    Ok(Buffer::tensor(Words::Own(buffer), shape, dtype, memory))
}

/// A tensor in memory of the caller.
///
/// # Safety
/// As [`Host::import`](super::Host::import).
pub(super) unsafe fn import(
    pointer: *mut u8,
    shape: &[usize],
    dtype: DType,
    keep_alive: Arc<dyn Any + Send + Sync>,
) -> Result<Tensor> {
    const OP: &str = "import";
    let bytes = shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d)).filter(|&n| isize::try_from(n).is_ok());
    let most = || format!("at most {} bytes", isize::MAX);
    ensure(bytes.is_some(), OP, "shape", most, || format!("{shape:?} of {dtype:?}"))?;
    ensure(
        !pointer.is_null() && pointer.addr().is_multiple_of(dtype.size()),
        OP,
        "pointer",
        || format!("a multiple of the {} bytes of {dtype:?}, not null", dtype.size()),
        || format!("{pointer:p}"),
    )?;
    // SAFETY: it is not null, and the caller promises the rest; the lock of a buffer lets nobody read what another writes.
    let lent = unsafe { Lent::new(pointer, bytes.unwrap_or(0), keep_alive) };
    Ok(Buffer::tensor(Words::Lent(lent), shape, dtype, Memory::Device))
}

fn buffer<'a>(op: &'static str, tensor: &'a Tensor) -> Result<&'a Buffer> {
    tensor.storage::<Buffer>().ok_or(Error::ForeignTensor { op, backend: "host" })
}

/// A tensor locked for reading.
pub(super) struct Input<'a> {
    words: RecursiveRwLockReadGuard<'a, Words>,
    from: usize,
    len: usize,
    dtype: DType,
}

/// A tensor locked for writing.
pub(super) struct Output<'a> {
    words: RecursiveRwLockWriteGuard<'a, Words>,
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
        cast_slice(self.bytes())
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

    /// The elements of an F32 or Bf16 tensor.
    pub(super) fn floats(&self) -> Floats<'_> {
        if self.dtype == DType::F32 { Floats::F32(self.f32()) } else { Floats::Bf16(self.bf16()) }
    }

    /// The bytes of the view.
    pub(super) fn bytes(&self) -> &[u8] {
        let size = self.dtype.size();
        &self.words.bytes()[self.from * size..(self.from + self.len) * size]
    }
}

impl Output<'_> {
    /// The elements as numbers of their size.
    fn view<T: AnyBitPattern + NoUninit>(&mut self) -> &mut [T] {
        debug_assert_eq!(self.dtype.size(), size_of::<T>());
        cast_slice_mut(self.bytes())
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
        &mut self.words.bytes_mut()[self.from * size..(self.from + self.len) * size]
    }
}

/// Rows that one thread should take at least, so that the work outweighs handing it out.
pub(super) fn min_rows(cols: usize) -> usize {
    (4096 / cols.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use std::alloc::Layout;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::backend::Backend;
    use crate::host::{Host, HostOptions};
    use crate::ops::{Add, Fill};

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

    /// Memory that somebody else gives back, and says so.
    struct Owner {
        pointer: *mut u8,
        layout: Layout,
        freed: Arc<AtomicBool>,
    }

    // SAFETY: nobody changes where it points to.
    unsafe impl Send for Owner {}
    // SAFETY: as above.
    unsafe impl Sync for Owner {}

    impl Owner {
        fn new(bytes: usize) -> (Owner, Arc<AtomicBool>) {
            let (layout, freed) = (Layout::from_size_align(bytes, 8).unwrap(), Arc::new(AtomicBool::new(false)));
            // SAFETY: the tests take some bytes, not none.
            let pointer = unsafe { std::alloc::alloc_zeroed(layout) };
            (Owner { pointer, layout, freed: freed.clone() }, freed)
        }
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            // SAFETY: allocated so in `new`.
            unsafe { std::alloc::dealloc(self.pointer, self.layout) };
            self.freed.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn imported_memory_is_used_where_it_lies_and_kept_while_a_view_of_it_is() -> Result<()> {
        let host = Host::new(HostOptions { threads: 1, ..HostOptions::default() })?;
        let backend: &dyn Backend = &host;
        let (owner, freed) = Owner::new(6 * 4);
        let (pointer, values) = (owner.pointer, owner.pointer.cast::<f32>());
        // SAFETY: it lives for as long as its owner, and no call uses it while this test does.
        let x = unsafe { host.import(pointer, &[3, 2], DType::F32, Arc::new(owner)) }?;
        assert_eq!(input("test", &x)?.bytes().as_ptr(), pointer.cast_const());
        assert_eq!((x.memory(), x.shape()), (Memory::Device, &[3, 2][..]));

        // What its owner writes, an op reads, and the other way round.
        // SAFETY: within the six numbers, while no call uses them; so for every pointer below.
        unsafe { values.add(3).write(1.5) };
        assert_eq!(backend.download::<f32>(&x)?, [0.0, 0.0, 0.0, 1.5, 0.0, 0.0]);
        let view = x.index(2)?;
        Fill { out: &view, value: 2.0 }.run(backend)?;
        // SAFETY: as above.
        assert_eq!(unsafe { [values.add(3).read(), values.add(4).read(), values.add(5).read()] }, [1.5, 2.0, 2.0]);
        let sum = backend.alloc(DType::F32, &[2], Memory::Device)?;
        Add { a: &x.index(1)?, b: &view, c: None, out: &sum }.run(backend)?;
        assert_eq!(backend.download::<f32>(&sum)?, [2.0, 3.5]);

        drop(x);
        assert!(!freed.load(Ordering::Relaxed), "freed under a view");
        // SAFETY: as above.
        unsafe { values.add(4).write(-1.0) };
        assert_eq!(backend.download::<f32>(&view)?, [-1.0, 2.0]);
        let last = view.clone();
        drop(view);
        assert!(!freed.load(Ordering::Relaxed), "freed under a clone");
        drop(last);
        assert!(freed.load(Ordering::Relaxed), "not freed with the last view");
        Ok(())
    }

    #[test]
    fn imported_memory_need_not_be_whole_words() -> Result<()> {
        let host = Host::new(HostOptions { threads: 1, ..HostOptions::default() })?;
        let backend: &dyn Backend = &host;
        let (owner, _) = Owner::new(8);
        let pointer = owner.pointer.wrapping_add(2);
        // SAFETY: three codes from the second on, which only this tensor uses.
        let x = unsafe { host.import(pointer, &[3], DType::Bf16, Arc::new(owner)) }?;
        backend.write(&x, bytemuck::cast_slice(&[1u16, 2, 3]))?;
        assert_eq!(backend.download::<u16>(&x.slice(1, 3)?)?, [2, 3]);
        Ok(())
    }

    #[test]
    fn memory_that_cannot_be_a_tensor_is_not_imported_and_let_go() {
        let host = Host::new(HostOptions { threads: 1, ..HostOptions::default() }).unwrap();
        let mut words = [0u64; 2];
        let pointer = words.as_mut_ptr().cast::<u8>();
        let cases: [(*mut u8, &[usize], &str); 4] = [
            (pointer.wrapping_add(2), &[1], "import: pointer is 0x"),
            (std::ptr::null_mut(), &[0], "import: pointer is 0x0, expected a multiple of the 4 bytes of F32, not null"),
            (pointer, &[usize::MAX, 3], "import: shape is [18446744073709551615, 3] of F32, expected at most "),
            (pointer, &[1 << 61], "import: shape is [2305843009213693952] of F32, expected at most "),
        ];
        for (pointer, shape, expected) in cases {
            let keep_alive = Arc::new(());
            // SAFETY: it is refused.
            let error = unsafe { host.import(pointer, shape, DType::F32, keep_alive.clone()) }.unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
            assert_eq!(Arc::strong_count(&keep_alive), 1);
        }
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
