//! Bringing up a backend op by op: what it does not have yet runs on the host.
//!
//! A [`Fallback`] is a device with a host backend next to it, and uses the device's memory. An op in the list of those
//! that the device has runs on the device; for any other op, its tensors are copied to the host, the op runs there, and
//! what it wrote is copied back. So a whole training step runs, with the right bits, from the first day on: slowly,
//! since every such op waits for the device and copies its operands both ways.
//!
//! # A new backend
//!
//! 1. **Memory.** Implement [`alloc`](Backend::alloc), [`write`](Backend::write), [`read`](Backend::read) and
//!    [`wait`](Backend::wait) for both kinds of [`Memory`], and [`record`](Backend::record) and
//!    [`wait_for`](Backend::wait_for); on a device with a single queue these two have nothing to do. The contents of a
//!    new buffer are undefined. The seven methods for ops return [`Unsupported`](crate::Error::Unsupported), for now.
//! 2. **A training step.** `Fallback::new(device, host, &[])` has every op; the program trains on it with the digest of
//!    the host. If this fails, the cause is the memory.
//! 3. **One op**, say `cast`: its file in `core/src/ops` has the arguments and the specification, NUMERICS.md the
//!    contract. Everything that [`Checked`] holds has been checked. Where a method gets several ops, such as
//!    [`Backend::map`], match the one and return [`Unsupported`](crate::Error::Unsupported) for the others. Then add it
//!    to the list: `Fallback::new(device, host, &["cast"])`.
//! 4. **Its bits.** The harness in `tests/` draws problems for the op and compares with the host. In a training step,
//!    `Lockstep::new(other_host, Fallback::new(device, host, &["cast"])?)` names the first op whose bits differ
//!    ([`crate::lockstep`]).
//! 5. **The next op.** Products first: most of the time goes there. An op that is in the list but not implemented is
//!    an error that names it. When all [names](crate::ops::names) are in the list, the fallback has nothing left to do.
//!
//! The list may be shorter than what the device has: with all ops but one in it, a step shows what that op costs or
//! breaks.

use crate::around::same_rank;
use crate::backend::{Backend, Caps, Event, Queue, Timings};
use crate::error::{Result, ensure};
use crate::ops::{self, Access, Checked, Op};
use crate::tensor::{DType, Memory, Tensor};

/// A device with some of the ops, and a host for the others. See the module.
#[derive(Debug)]
pub struct Fallback<D, H> {
    caps: Caps,
    device: D,
    host: H,
    has: Vec<&'static str>,
}

impl<D: Backend, H: Backend> Fallback<D, H> {
    /// `has` lists the [names](crate::ops::names) of the ops that run on the device. With several ranks, each device is
    /// paired with the host of the same rank.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] for a name that no op has, and when the two follow different models of the matrix
    /// units or are different ranks.
    pub fn new(device: D, host: H, has: &[&str]) -> Result<Fallback<D, H>> {
        for name in has {
            let known = ops::names().any(|known| known == *name);
            let all = || format!("one of {}", ops::names().collect::<Vec<_>>().join(", "));
            ensure(known, "fallback", "has", all, || (*name).to_owned())?;
        }
        let has = ops::names().filter(|name| has.contains(name)).collect();
        same_rank("fallback", "host", device.caps(), host.caps())?;
        let caps = Caps { timeouts: device.caps().timeouts.and(&host.caps().timeouts), ..device.caps().clone() };
        Ok(Fallback { caps, device, host, has })
    }

    /// The tensor on the host.
    fn fetch(&self, tensor: &Tensor) -> Result<Tensor> {
        let copy = self.host.alloc(tensor.dtype(), tensor.shape(), tensor.memory())?;
        let mut bytes = vec![0; tensor.bytes()];
        self.device.read(tensor, &mut bytes)?;
        self.host.write(&copy, &bytes)?;
        Ok(copy)
    }

    fn run<'a, T: Op<'a>>(&self, op: &Checked<T>) -> Result<()> {
        if self.has.contains(&op.name()) {
            return op.queue(&self.device);
        }
        // The operands may come from any queue, and the results may go to any.
        self.device.wait()?;
        // An op may leave a part of what it writes as it was, so all of its tensors are fetched.
        op.over(
            |tensor| self.fetch(tensor),
            |on_host| {
                on_host.queue(&self.host)?;
                for (here, there) in op.uses().into_iter().zip(on_host.uses()) {
                    if here.access != Access::Read {
                        let mut bytes = vec![0; there.tensor.bytes()];
                        self.host.read(there.tensor, &mut bytes)?;
                        self.device.write(here.tensor, &bytes)?;
                    }
                }
                Ok(())
            },
        )?;
        self.device.wait()
    }
}

impl<D: Backend, H: Backend> Backend for Fallback<D, H> {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        self.device.alloc(dtype, shape, memory)
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        self.device.write(dst, bytes)
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        self.device.read(src, bytes)
    }

    fn wait(&self) -> Result<()> {
        self.device.wait()
    }

    fn timings(&self) -> Result<Option<Timings>> {
        self.device.timings()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        self.device.record(queue)
    }

    fn wait_for(&self, queue: Queue, event: &Event) -> Result<()> {
        self.device.wait_for(queue, event)
    }

    crate::each_op!(run: grouped_gemm, group_quantize, all_to_all, offload, route, attention, map);
}
