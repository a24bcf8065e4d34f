//! Tensors in host memory: where offloaded activations wait.
//!
//! A copy to the host ends in a callback of the device some time after its op was queued. Whoever wants the bytes
//! before that waits for the device.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use dropless_core::{DType, Error, Memory, Result, Tensor};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::BACKEND;
use crate::buffer;
use crate::device::Gpu;

/// The bytes of a tensor in host memory.
#[derive(Debug, Default)]
pub(crate) struct HostMemory {
    bytes: Mutex<Vec<u8>>,
    copies: Mutex<Copies>,
    /// One of them has ended.
    ended: Condvar,
}

/// Copies to here.
#[derive(Debug, Default)]
struct Copies {
    /// Queued and not done.
    pending: usize,
    failed: bool,
}

/// How long the thread that has heard from the device takes to call back, at most.
const CALLED_BACK: Duration = Duration::from_secs(10);

/// A new tensor in host memory.
pub(crate) fn alloc(dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let available = isize::MAX.unsigned_abs() as u64;
    let len = buffer::size(dtype, shape, available)?;
    let refused =
        || Error::Capacity { op: "alloc", needed: len, available: 0, hint: "the system refused host memory".into() };
    let len = usize::try_from(len).map_err(|_| refused())?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| refused())?;
    bytes.resize(len, 0);
    let storage = Arc::new(HostMemory { bytes: Mutex::new(bytes), ..HostMemory::default() });
    Ok(Tensor::from_storage(storage, shape, dtype, Memory::Host))
}

/// The memory of a tensor of this backend.
pub(crate) fn of(op: &'static str, tensor: &Tensor) -> Result<Arc<HostMemory>> {
    let foreign = Error::ForeignTensor { op, backend: BACKEND };
    tensor.shared_storage::<HostMemory>().ok_or(foreign)
}

impl HostMemory {
    /// The bytes, after every copy to here is done.
    pub(crate) fn settled(&self, op: &'static str, gpu: &Gpu) -> Result<MutexGuard<'_, Vec<u8>>> {
        if self.copies.lock().pending > 0 {
            gpu.wait(op)?;
        }
        let mut copies = self.copies.lock();
        // Another thread may have waited for the device, too, and not have called back yet.
        self.ended.wait_while_for(&mut copies, |copies| copies.pending > 0 && !copies.failed, CALLED_BACK);
        if copies.pending > 0 || copies.failed {
            return Err(Error::Device { backend: BACKEND, op, what: "a copy to host memory did not end".into() });
        }
        Ok(self.bytes.lock())
    }

    /// Takes the bytes from `begin` on of `staging` to the range `to` as soon as the device is done with it.
    pub(crate) fn receive(self: Arc<Self>, staging: wgpu::Buffer, begin: usize, to: Range<usize>) {
        self.copies.lock().pending += 1;
        let slice = staging.clone();
        slice.slice(..).map_async(wgpu::MapMode::Read, move |mapped| {
            let view = mapped.ok().and_then(|()| staging.slice(..).get_mapped_range().ok());
            if let Some(view) = &view {
                let len = to.len();
                self.bytes.lock()[to].copy_from_slice(&view[begin..begin + len]);
            }
            let mut copies = self.copies.lock();
            copies.failed |= view.is_none();
            copies.pending -= 1;
            self.ended.notify_all();
        });
    }
}
