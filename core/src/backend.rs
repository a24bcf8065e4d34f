//! The one trait that a device implements.

use crate::error::Result;
use crate::numerics::NumericModel;
use crate::ops::{AllToAll, Attention, Checked, GroupQuantize, GroupedGemm, Map, Offload, Route};
use crate::tensor::{DType, Memory, Tensor};

/// What a backend is and can do. Ops are checked against it once, before they are queued.
#[derive(Clone, Debug)]
pub struct Caps {
    /// `host`, `wgpu` or `cuda`.
    pub backend: &'static str,
    /// The device, in words.
    pub device: String,
    /// The arithmetic of its matrix products.
    pub numerics: NumericModel,
    /// This rank.
    pub rank: usize,
    /// Number of ranks that take part in [`Backend::all_to_all`].
    pub ranks: usize,
    /// The largest buffer it can address, in bytes.
    pub max_buffer_bytes: u64,
}

/// The queues of a device. Work on one queue runs in order; events order the queues among each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Queue {
    /// Every op but the two below.
    Compute,
    /// [`Backend::all_to_all`].
    Comm,
    /// [`Backend::offload`].
    Offload,
}

/// A point in a queue.
#[derive(Clone, Debug)]
pub struct Event(pub std::sync::Arc<dyn EventState>);

/// What a backend keeps of an [`Event`].
pub trait EventState: std::any::Any + Send + Sync + std::fmt::Debug {}

/// A device with its memory, its ops and its place among the ranks.
///
/// Ops are queued in the order of the calls; only [`read`](Backend::read) and [`wait`](Backend::wait) block. An op
/// never reads a group size, an offset or a count on the host. Ops take [`Checked`] arguments, so an implementation
/// need not look at shapes again.
pub trait Backend: std::fmt::Debug + Send + Sync {
    /// What this backend is and can do.
    fn caps(&self) -> &Caps;

    /// A new buffer with undefined contents.
    ///
    /// # Errors
    /// [`crate::Error::Capacity`] when the memory is not there.
    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor>;

    /// Copies `bytes` (little endian, row-major, as long as the tensor) into `dst`, ordered with the compute queue.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when the lengths differ.
    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()>;

    /// Waits for the compute queue and copies `src` out.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when the lengths differ; whatever went wrong in the work waited for.
    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()>;

    /// Waits for every queue.
    ///
    /// # Errors
    /// Whatever went wrong in the work waited for.
    fn wait(&self) -> Result<()>;

    /// Marks the present end of a queue.
    ///
    /// # Errors
    /// A failure of the device.
    fn record(&self, queue: Queue) -> Result<Event>;

    /// Later work on `queue` starts only after `event`.
    ///
    /// # Errors
    /// A failure of the device.
    fn wait_for(&self, queue: Queue, event: &Event) -> Result<()>;

    /// See [`GroupedGemm`].
    ///
    /// # Errors
    /// A failure of the device, or a tensor of another backend; so for every op below.
    fn grouped_gemm(&self, op: &Checked<GroupedGemm<'_>>) -> Result<()>;

    /// See [`GroupQuantize`].
    ///
    /// # Errors
    /// As [`grouped_gemm`](Backend::grouped_gemm).
    fn group_quantize(&self, op: &Checked<GroupQuantize<'_>>) -> Result<()>;

    /// See [`AllToAll`].
    ///
    /// # Errors
    /// [`crate::Error::Collective`] when ranks disagree, fail or do not arrive.
    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()>;

    /// See [`Offload`].
    ///
    /// # Errors
    /// As [`grouped_gemm`](Backend::grouped_gemm).
    fn offload(&self, op: &Checked<Offload<'_>>) -> Result<()>;

    /// See [`Route`].
    ///
    /// # Errors
    /// As [`grouped_gemm`](Backend::grouped_gemm).
    fn route(&self, op: &Checked<Route<'_>>) -> Result<()>;

    /// See [`Attention`].
    ///
    /// # Errors
    /// As [`grouped_gemm`](Backend::grouped_gemm).
    fn attention(&self, op: &Checked<Attention<'_>>) -> Result<()>;

    /// See [`Map`].
    ///
    /// # Errors
    /// As [`grouped_gemm`](Backend::grouped_gemm).
    fn map(&self, op: &Checked<Map<'_>>) -> Result<()>;
}

impl dyn Backend + '_ {
    /// A new device tensor holding `values`, whose size must be that of `dtype` (bf16 codes as u16, e4m3 as u8).
    ///
    /// # Errors
    /// As [`Backend::alloc`] and [`Backend::write`].
    pub fn upload<T: bytemuck::NoUninit>(&self, dtype: DType, shape: &[usize], values: &[T]) -> Result<Tensor> {
        let tensor = self.alloc(dtype, shape, Memory::Device)?;
        self.write(&tensor, bytemuck::cast_slice(values))?;
        Ok(tensor)
    }

    /// The elements of a tensor.
    ///
    /// # Errors
    /// As [`Backend::read`].
    pub fn download<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&self, tensor: &Tensor) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); tensor.bytes() / size_of::<T>()];
        self.read(tensor, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}
