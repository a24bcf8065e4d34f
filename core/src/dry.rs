//! A backend without memory and without arithmetic: it adds up the bytes of the tensors that live, and of the most that
//! lived at once. What is built and run over it is built and run as over any other backend, so what it counts is what
//! another backend would be asked for; nothing is allocated, however large the tensors.
//!
//! Reads give zeros, so work whose course depends on what it reads is not followed.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::backend::{Backend, Caps, Event, EventState, Queue, Timings};
use crate::error::{Error, Result};
use crate::ops::{AllToAll, Attention, Checked, GroupQuantize, GroupedGemm, Map, Offload, Route};
use crate::tensor::{DType, Memory, Tensor};

/// What a device takes for what it is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Footprint {
    /// Bytes of the block in which a tensor of so many bytes lies.
    pub block: fn(u64) -> u64,
    /// Whether rows with counts arrive in a buffer of the backend's first, as large as the tensor that receives them.
    pub staged_exchange: bool,
}

impl Default for Footprint {
    /// The tensors, and nothing else.
    fn default() -> Self {
        Footprint { block: |bytes| bytes, staged_exchange: false }
    }
}

/// Bytes in each memory. They saturate: what does not fit in 64 bits fits nowhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// In [`Memory::Device`].
    pub device: u64,
    /// In [`Memory::Host`].
    pub host: u64,
}

impl Bytes {
    fn of(&mut self, memory: Memory) -> &mut u64 {
        match memory {
            Memory::Device => &mut self.device,
            Memory::Host => &mut self.host,
        }
    }
}

#[derive(Debug, Default)]
struct Meter {
    live: Bytes,
    most: Bytes,
    exchange: u64,
}

impl Meter {
    fn add(&mut self, memory: Memory, bytes: u64) {
        let live = self.live.of(memory);
        *live = live.saturating_add(bytes);
        let (live, most) = (*live, self.most.of(memory));
        *most = live.max(*most);
    }

    fn remove(&mut self, memory: Memory, bytes: u64) {
        let live = self.live.of(memory);
        *live = live.saturating_sub(bytes);
    }
}

/// See the module.
#[derive(Debug)]
pub struct Dry {
    caps: Caps,
    footprint: Footprint,
    meter: Arc<Mutex<Meter>>,
}

/// The place of a tensor; its bytes go with the last clone.
#[derive(Debug)]
struct Lease {
    memory: Memory,
    bytes: u64,
    meter: Arc<Mutex<Meter>>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.meter.lock().remove(self.memory, self.bytes);
    }
}

#[derive(Debug)]
struct Done;

impl EventState for Done {}

impl Dry {
    /// In the place of a backend with these capabilities.
    pub fn new(caps: Caps, footprint: Footprint) -> Dry {
        Dry { caps, footprint, meter: Arc::default() }
    }

    /// Bytes that live now.
    pub fn live(&self) -> Bytes {
        self.meter.lock().live
    }

    /// The most bytes that lived at once so far, in each memory.
    pub fn most(&self) -> Bytes {
        self.meter.lock().most
    }

    /// The most bytes that one exchange sent, received and staged.
    pub fn most_exchanged(&self) -> u64 {
        self.meter.lock().exchange
    }
}

impl Backend for Dry {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        let bytes = shape.iter().try_fold(dtype.size(), |n, &extent| n.checked_mul(extent));
        let available = self.caps.max_buffer_bytes;
        let refused = || Error::Capacity {
            op: "alloc",
            needed: bytes.map_or(u64::MAX, |n| n as u64),
            available,
            hint: "the largest buffer; a smaller batch, or more chunks".into(),
        };
        let bytes = bytes.map(|n| n as u64).filter(|&n| n <= available).ok_or_else(refused)?;
        let bytes = (self.footprint.block)(bytes);
        self.meter.lock().add(memory, bytes);
        let lease = Lease { memory, bytes, meter: self.meter.clone() };
        Ok(Tensor::from_storage(Arc::new(lease), shape, dtype, memory))
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        dst.has_bytes("write", bytes.len())
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        src.has_bytes("read", bytes.len())?;
        bytes.fill(0);
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }

    fn timings(&self) -> Result<Option<Timings>> {
        Ok(None)
    }

    fn record(&self, _queue: Queue) -> Result<Event> {
        Ok(Event(Arc::new(Done)))
    }

    fn wait_for(&self, _queue: Queue, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn grouped_gemm(&self, _op: &Checked<GroupedGemm<'_>>) -> Result<()> {
        Ok(())
    }

    fn group_quantize(&self, _op: &Checked<GroupQuantize<'_>>) -> Result<()> {
        Ok(())
    }

    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()> {
        let (send, recv) = (op.send.bytes() as u64, op.recv.bytes() as u64);
        let staged = if self.footprint.staged_exchange && op.counts.is_some() { recv } else { 0 };
        let block = (self.footprint.block)(staged);
        let mut meter = self.meter.lock();
        meter.exchange = meter.exchange.max(send.saturating_add(recv).saturating_add(staged));
        if staged > 0 {
            meter.add(Memory::Device, block);
            meter.remove(Memory::Device, block);
        }
        Ok(())
    }

    fn offload(&self, _op: &Checked<Offload<'_>>) -> Result<()> {
        Ok(())
    }

    fn route(&self, _op: &Checked<Route<'_>>) -> Result<()> {
        Ok(())
    }

    fn attention(&self, _op: &Checked<Attention<'_>>) -> Result<()> {
        Ok(())
    }

    fn map(&self, _op: &Checked<Map<'_>>) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{Host, HostOptions};
    use crate::ops::Fill;

    fn dry(footprint: Footprint) -> Dry {
        let host = Host::new(HostOptions { threads: 1, ..HostOptions::default() }).unwrap();
        Dry::new(Caps { max_buffer_bytes: 1 << 50, ..host.caps().clone() }, footprint)
    }

    #[test]
    fn bytes_live_as_long_as_the_last_view_and_nothing_is_allocated() -> Result<()> {
        let dry = dry(Footprint::default());
        let huge = dry.alloc(DType::F32, &[1 << 40], Memory::Device)?;
        let pinned = dry.alloc(DType::Bf16, &[3], Memory::Host)?;
        Fill { out: &huge, value: 1.0 }.run(&dry)?;
        assert_eq!(dry.live(), Bytes { device: 4 << 40, host: 6 });
        let view = huge.slice(5, 7)?;
        drop((huge, pinned));
        assert_eq!(dry.live(), Bytes { device: 4 << 40, host: 0 });
        let backend: &dyn Backend = &dry;
        assert_eq!(backend.download::<f32>(&view)?, [0.0; 2]);
        drop(view);
        assert_eq!((dry.live(), dry.most()), (Bytes::default(), Bytes { device: 4 << 40, host: 6 }));
        Ok(())
    }

    #[test]
    fn blocks_are_counted_and_what_no_buffer_holds_is_refused() -> Result<()> {
        let dry = dry(Footprint { block: |bytes| bytes.next_multiple_of(512), ..Footprint::default() });
        let _one = dry.alloc(DType::F32, &[1], Memory::Device)?;
        assert_eq!(dry.live().device, 512);
        for shape in [&[1 << 50][..], &[usize::MAX, 8]] {
            let refused = dry.alloc(DType::F32, shape, Memory::Device);
            assert!(matches!(refused, Err(Error::Capacity { .. })), "{refused:?}");
        }
        assert_eq!(dry.live().device, 512);
        Ok(())
    }
}
