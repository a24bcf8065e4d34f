//! Tensors in the device's memory: words, viewed as the tensor's element type.

use std::ops::Range;
use std::sync::Arc;

use dropless_core::{DType, Error, Memory, Result, Tensor};

use crate::BACKEND;
use crate::device::{Gpu, UNIT};

/// Where a binding may start; the least that every adapter allows.
const BINDING_ALIGNMENT: u64 = 256;

/// The words of a tensor on the device. Clones show the same memory.
#[derive(Clone, Debug)]
pub(crate) struct Buffer {
    pub(crate) raw: wgpu::Buffer,
    /// Bytes that belong to the tensor; the last word may have more.
    pub(crate) bytes: u64,
    /// Its number in a recording; 0 if there is none.
    pub(crate) recorded: usize,
    gpu: Arc<Gpu>,
}

impl Buffer {
    /// The whole buffer as words.
    pub(crate) fn words(&self) -> Tensor {
        let words = usize::try_from(self.raw.size() / 4).expect("the buffer was made from a shape of usize");
        Tensor::from_storage(Arc::new(self.clone()), &[words], DType::U32, Memory::Device)
    }
}

/// Size of a new tensor, refused where it passes what the device can bind.
pub(crate) fn size(dtype: DType, shape: &[usize], available: u64) -> Result<u64> {
    let bytes = shape.iter().try_fold(dtype.size() as u64, |n, &d| n.checked_mul(d as u64)).unwrap_or(u64::MAX);
    if bytes > available {
        let hint = "the adapter's largest buffer; a smaller batch, or more chunks".into();
        return Err(Error::Capacity { op: "alloc", needed: bytes, available, hint });
    }
    Ok(bytes)
}

/// A new tensor in device memory.
pub(crate) fn alloc(gpu: &Arc<Gpu>, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let bytes = size(dtype, shape, gpu.max_buffer_bytes)?;
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
    let raw = gpu.buffer("alloc", bytes, usage)?;
    let recorded = gpu.recorder.as_ref().map_or(0, |recorder| recorder.buffer(raw.size()));
    let storage = Arc::new(Buffer { raw, bytes, recorded, gpu: gpu.clone() });
    Ok(Tensor::from_storage(storage, shape, dtype, Memory::Device))
}

/// The buffer of a tensor that lives on this device.
pub(crate) fn of<'a>(op: &'static str, gpu: &Arc<Gpu>, tensor: &'a Tensor) -> Result<&'a Buffer> {
    let foreign = Error::ForeignTensor { op, backend: BACKEND };
    let buffer = tensor.storage::<Buffer>().ok_or(foreign)?;
    if Arc::ptr_eq(&buffer.gpu, gpu) { Ok(buffer) } else { Err(Error::ForeignTensor { op, backend: BACKEND }) }
}

/// The part of its buffer that a shader sees of a view: whole units around it.
pub(crate) fn bound(buffer: &Buffer, tensor: &Tensor) -> Range<u64> {
    let unit = UNIT as u64;
    let bytes = range(tensor);
    // An empty view may lie at the very end of its buffer, where no binding can start.
    let start = bytes.start.min(buffer.raw.size() - unit) / BINDING_ALIGNMENT * BINDING_ALIGNMENT;
    start..start + (bytes.end - start).next_multiple_of(unit).clamp(unit, buffer.raw.size() - start)
}

/// The bytes of a view, counted from the start of its buffer.
pub(crate) fn range(tensor: &Tensor) -> Range<u64> {
    let start = (tensor.offset() * tensor.dtype().size()) as u64;
    start..start + tensor.bytes() as u64
}
