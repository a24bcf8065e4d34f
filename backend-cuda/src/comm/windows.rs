//! The memory through which the members of a group exchange rows when their devices reach each other: see
//! `kernels/all_to_all_peer.cuh` for what is in it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use dropless_core::{DType, Error, Result, Tensor};

use super::board::ENTRY;
use super::control::Control;
use super::descriptors::Mailbox;
use super::shared_memory::SharedMemory;
use crate::BACKEND;
use crate::device::Gpu;
use crate::memory;

const OP: &str = "exchange window";
/// Where the slots begin: after the members' entries.
const SLOTS_AT: u32 = 64 << 10;
/// The size of a window. What is longer goes in rounds of some microseconds more each; 512 MiB take a millisecond.
const BYTES: u32 = 512 << 20;
/// Slots begin at multiples of this.
const ALIGNMENT: u32 = 512;

/// A window of this device and those of the other members.
#[derive(Debug)]
pub(crate) struct Windows {
    /// Their addresses, u64 `[members]` as pairs of u32.
    table: Tensor,
    _memory: Vec<SharedMemory>,
}

impl Windows {
    /// Opens a window and maps those of the others, who do the same.
    pub(super) fn open(
        gpu: &Arc<Gpu>,
        control: &Control,
        members: &[usize],
        place: usize,
        timeout: Duration,
    ) -> Result<Windows> {
        let system = |e: std::io::Error| Error::Device { backend: BACKEND, op: OP, what: e.to_string() };
        gpu.bind(OP)?;
        let own = SharedMemory::new(gpu.context(), BYTES as usize)?;
        let mailbox = Mailbox::open().map_err(system)?;
        // What a member has told its mailbox's name is also full of zeros.
        let names = control.gather(OP, members, mailbox.name().into(), timeout)?;
        let names: Vec<_> = names.into_iter().map(|name| String::from_utf8_lossy(&name).into_owned()).collect();
        let descriptor = own.export()?;
        let others = mailbox.exchange(descriptor.as_fd(), &names, place, timeout).map_err(system)?;
        let bytes = own.bytes();
        let mut memory = Vec::with_capacity(members.len());
        for descriptor in others.iter().flatten() {
            memory.push(SharedMemory::import(gpu.context(), descriptor.as_fd(), bytes)?);
        }
        memory.insert(place, own);
        let addresses: Vec<u64> = memory.iter().map(SharedMemory::address).collect();
        let table = gpu.alloc(DType::U32, &[2 * members.len()])?;
        memory::write(OP, gpu, &table, bytemuck::cast_slice(&addresses))?;
        Ok(Windows { table, _memory: memory })
    }

    /// The most members that have room for their entries.
    pub(super) const MEMBERS: usize = (SLOTS_AT / (ENTRY * 4)) as usize;

    /// The addresses for a kernel.
    pub(crate) fn table(&self) -> &Tensor {
        &self.table
    }

    /// Where in a window the slots begin, and how long each of that many is.
    pub(crate) fn slots(number: usize) -> (u32, u32) {
        let number = u32::try_from(number).expect("at most as many as members");
        (SLOTS_AT, (BYTES - SLOTS_AT) / number / ALIGNMENT * ALIGNMENT)
    }
}
