//! Activations that the backward pass needs: kept, offloaded to host memory, or recomputed (activation checkpointing).

use dropless_core::Result;
use dropless_core::ops::Offload;
use dropless_core::{Backend, Event, Queue};
use dropless_core::{Memory, Tensor};

/// What is done with an activation between the forward and the backward pass. Does not affect results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// Stays in device memory.
    #[default]
    Keep,
    /// Offloaded to host memory.
    Offload,
    /// Activation checkpointing: dropped, and recomputed from the activations kept before it.
    Recompute,
}

/// One saved activation.
///
/// A layer asks for it with [`load`](Saved::load); on `None` (never computed, or dropped) the layer computes it,
/// exactly as in the forward pass, and puts it back with [`set`](Saved::set). So activation checkpointing has no code
/// of its own.
#[derive(Debug, Default)]
pub struct Saved {
    device: Option<Tensor>,
    host: Option<Tensor>,
    /// When the copy from `host` to `device` is done.
    arrival: Option<Event>,
}

impl Saved {
    /// Begins to bring the activation back from host memory, if it is there, while the device works on something else.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn prefetch(&mut self, backend: &dyn Backend) -> Result<()> {
        if let (None, Some(host)) = (&self.device, &self.host) {
            let device = backend.alloc(host.dtype(), host.shape(), Memory::Device)?;
            // Work that was queued earlier may still use the memory that was reused here.
            backend.wait_for(Queue::Offload, &backend.record(Queue::Compute)?)?;
            Offload { from: host, to: &device }.run(backend)?;
            self.arrival = Some(backend.record(Queue::Offload)?);
            self.device = Some(device);
        }
        Ok(())
    }

    /// The activation in device memory, brought back from host memory if it is there.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn load(&mut self, backend: &dyn Backend) -> Result<Option<Tensor>> {
        self.prefetch(backend)?;
        if let Some(arrival) = self.arrival.take() {
            backend.wait_for(Queue::Compute, &arrival)?;
        }
        Ok(self.device.clone())
    }

    /// Remembers a freshly computed activation and hands it on.
    pub fn set(&mut self, tensor: Tensor) -> Tensor {
        self.device = Some(tensor.clone());
        tensor
    }

    /// Ends the forward pass: does what the policy says.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn settle(&mut self, backend: &dyn Backend, policy: Policy) -> Result<()> {
        let (Some(device), false) = (&self.device, policy == Policy::Keep) else { return Ok(()) };
        if policy == Policy::Offload {
            let host = backend.alloc(device.dtype(), device.shape(), Memory::Host)?;
            backend.wait_for(Queue::Offload, &backend.record(Queue::Compute)?)?;
            Offload { from: device, to: &host }.run(backend)?;
            self.host = Some(host);
        }
        self.device = None;
        Ok(())
    }
}
