//! A device: its context, its streams, its memory and its compiled kernels.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use dropless_core::launch::Variant;
use dropless_core::{Error, Queue, Result, World};
use parking_lot::{Mutex, RwLock};

use crate::BACKEND;
use crate::driver::{self, Context, During, Event, Function, Kind, Stream};
use crate::jit::Jit;
use crate::pool::{KeepAlive, Pool, Pools};
use crate::progress::Progress;
use crate::timeline::Timeline;

/// What `dropless doctor` says of a device.
#[derive(Clone, Debug)]
pub struct DeviceReport {
    /// The index under which it is opened.
    pub index: usize,
    /// As the driver names it.
    pub name: String,
    /// Compute capability, e.g. (9, 0).
    pub capability: (i32, i32),
    /// Bytes of memory.
    pub memory: u64,
    /// Why the backend cannot use it.
    pub refused: Option<String>,
}

/// The devices of this machine.
///
/// # Errors
/// [`Error::Unavailable`] without a driver or a device.
pub fn devices() -> Result<Vec<DeviceReport>> {
    driver::init()?;
    let count = result::device::get_count().during("devices")?;
    (0..count).map(report).collect()
}

/// Index of a process's device: its place on the machine, unless it was shown a single device.
///
/// # Errors
/// As [`devices`].
pub fn device_of(world: &World) -> Result<usize> {
    Ok(if devices()?.len() == 1 { 0 } else { world.local_rank })
}

/// Whether the first device of this machine can be opened, and the compiler is there.
pub fn usable() -> bool {
    devices().is_ok_and(|devices| devices[0].refused.is_none()) && Jit::new(ARCHITECTURE).is_ok()
}

fn report(ordinal: i32) -> Result<DeviceReport> {
    let device = result::device::get(ordinal).during("devices")?;
    let attribute = |attribute| {
        // SAFETY: the device exists.
        unsafe { result::device::get_attribute(device, attribute) }.during("devices")
    };
    let capability = (
        attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    // SAFETY: the device exists.
    let memory = unsafe { result::device::total_mem(device) }.during("devices")? as u64;
    let (major, minor) = capability;
    let refused = (capability != (9, 0)).then(|| {
        format!("compute capability {major}.{minor}: the tensor cores' arithmetic is known of 9.0 (H100, H200) only")
    });
    let name = result::device::get_name(device).during("devices")?;
    let index = usize::try_from(ordinal).expect("an index");
    Ok(DeviceReport { index, name, capability, memory, refused })
}

/// The one whose arithmetic is known.
const ARCHITECTURE: &str = "sm_90a";

/// An opened device.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) name: String,
    /// Total bytes of device memory.
    pub(crate) memory_bytes: u64,
    /// Streaming multiprocessors: the blocks of a persistent grid.
    pub(crate) multiprocessors: u32,
    /// Whether every launch waits for its end, so that a failure shows at the call that caused it.
    synchronous: bool,
    /// The kernels that are loaded.
    pub(crate) functions: RwLock<HashMap<Variant, Arc<Function>>>,
    pub(crate) jit: Jit,
    pub(crate) progress: Progress,
    pub(crate) timeline: Timeline,
    compute: Stream,
    comm: Stream,
    offload: Stream,
    pools: Pools,
    /// The memory of the graph that is being recorded.
    pub(crate) capture: Mutex<Option<Pools>>,
    /// Last, so that everything above goes first.
    context: Context,
}

/// Every queue.
pub(crate) const QUEUES: [Queue; 3] = [Queue::Compute, Queue::Comm, Queue::Offload];

impl Gpu {
    /// `compute`: the stream of the compute queue, a new one if None.
    pub(crate) fn open(index: usize, synchronous: bool, compute: Option<Stream>) -> Result<Arc<Gpu>> {
        let unavailable = |why| Error::Unavailable { backend: BACKEND, why };
        let all = devices()?;
        let found =
            all.get(index).ok_or_else(|| unavailable(format!("no device {index}: this machine has {}", all.len())))?;
        if let Some(why) = &found.refused {
            return Err(unavailable(format!("{}: {why}", found.name)));
        }
        let jit = Jit::new(ARCHITECTURE)?;
        let context = Context::retain(i32::try_from(index).expect("an index"))?;
        context.bind("open")?;
        if let Some(stream) = &compute {
            context.check(stream)?;
        }
        let count = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(Arc::new(Gpu {
            name: found.name.clone(),
            memory_bytes: found.memory,
            multiprocessors: count.unsigned_abs(),
            synchronous,
            functions: RwLock::default(),
            jit,
            progress: Progress::new()?,
            timeline: Timeline::default(),
            compute: compute.map_or_else(Stream::new, Ok)?,
            comm: Stream::new()?,
            offload: Stream::new()?,
            pools: Pools::new(),
            capture: Mutex::default(),
            context,
        }))
    }

    /// Dense bf16 operations of the tensor cores in a second at the boost clock of the vendor's data sheet: 989 * 10^12 for
    /// the 132 multiprocessors of an H100 or H200 SXM.
    pub(crate) fn peak_flops(&self) -> f64 {
        const PER_CLOCK: f64 = 4096.0;
        const CLOCK: f64 = 1.83e9;
        f64::from(self.multiprocessors) * PER_CLOCK * CLOCK
    }

    /// Makes the device the calling thread's.
    pub(crate) fn bind(&self, op: &'static str) -> Result<()> {
        self.context.bind(op)
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn stream(&self, queue: Queue) -> &Stream {
        match queue {
            Queue::Compute => &self.compute,
            Queue::Comm => &self.comm,
            Queue::Offload => &self.offload,
        }
    }

    /// Later work on `to` starts after the work on `from` so far.
    pub(crate) fn order(&self, op: &'static str, from: Queue, to: Queue) -> Result<()> {
        self.stream(to).wait(op, &Event::record(op, self.stream(from))?)
    }

    /// Waits for every stream.
    pub(crate) fn synchronize(&self, op: &'static str) -> Result<()> {
        QUEUES.into_iter().try_for_each(|queue| self.wait(op, queue))
    }

    /// Waits for a stream.
    pub(crate) fn wait(&self, op: &'static str, queue: Queue) -> Result<()> {
        self.stream(queue).synchronize(op)
    }

    /// The result of a call. A device that has failed fails every later call: their error names the op that was running.
    pub(crate) fn blame<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match error {
            Error::Device { backend, op, what } if !self.recording() && self.compute.has_failed() => {
                let mut running = QUEUES.into_iter().filter_map(|queue| self.progress.running(queue));
                let culprit = running.next().unwrap_or(op);
                let others: String = running.map(|other| format!(", or of {other} on another queue")).collect();
                Error::Device { backend, op: culprit, what: format!("{what}{others}, noticed by {op}") }
            }
            error => error,
        })
    }

    /// After a launch: in the synchronous mode, waits for it.
    pub(crate) fn launched(&self, op: &'static str, queue: Queue) -> Result<()> {
        if self.synchronous && !self.recording() { self.wait(op, queue) } else { Ok(()) }
    }

    /// Whether work is recorded for a graph and not run.
    pub(crate) fn recording(&self) -> bool {
        self.capture.lock().is_some()
    }

    /// Waits for every stream and gives memory back to the driver that is kept for tensors to come. Not while work is
    /// recorded, which a wait would end.
    pub(crate) fn trim(&self, op: &'static str, kind: Kind) -> Result<()> {
        // SAFETY: waits for every stream.
        unsafe { self.pools.of(kind).trim(|| self.synchronize(op)) }
    }

    /// Where new tensors come from.
    pub(crate) fn pool(&self, kind: Kind) -> Arc<Pool> {
        self.capture.lock().as_ref().unwrap_or(&self.pools).of(kind).clone()
    }

    /// Where the memory of a tensor from `home` goes: a graph that is being recorded keeps what its work uses.
    pub(crate) fn recycle(&self, home: &Arc<Pool>) -> Arc<Pool> {
        let capture = self.capture.lock();
        match &*capture {
            Some(capture) if Arc::ptr_eq(home, self.pools.of(home.kind)) => capture.of(home.kind).clone(),
            _ => home.clone(),
        }
    }

    /// Whether a pool goes with the device; or need not be waited for, since a recording began when all work was done and
    /// keeps what it uses.
    pub(crate) fn outlives(&self, pool: &Arc<Pool>) -> bool {
        self.pools.has(pool) || self.recording()
    }

    /// Gives what keeps a caller's memory alive to the graph that is being recorded; back, if there is none.
    pub(crate) fn keep(&self, keep_alive: KeepAlive) -> std::result::Result<(), KeepAlive> {
        match &*self.capture.lock() {
            Some(capture) => {
                capture.keep(keep_alive);
                Ok(())
            }
            None => Err(keep_alive),
        }
    }

    /// Lets the graph that is being recorded own what `outside` gives: a thing that the work uses and the graph did not make.
    pub(crate) fn keep_recorded(&self, outside: impl FnOnce(&Pools) -> Option<KeepAlive>) {
        // What is let go of here may lead back to the recording: the lock is not held then.
        let graph = self.capture.lock().clone();
        if let Some(graph) = graph
            && let Some(kept) = outside(&graph)
        {
            graph.keep(kept);
        }
    }

    /// What a tensor that `queue` has used waits for before its memory is given out again.
    pub(crate) fn fence(&self, queue: Queue) -> Result<Option<Event>> {
        const OP: &str = "drop";
        let stream = self.stream(queue);
        // A recording began when all work was done, and cannot wait for a stream that takes no part in it.
        let done = self.recording() && !stream.is_recorded(OP)?;
        if done { Ok(None) } else { Event::record(OP, stream).map(Some) }
    }

    /// Bytes of device memory that came from the driver, and bytes of living tensors.
    pub(crate) fn usage(&self) -> (u64, u64) {
        self.pools.of(Kind::Device).usage()
    }
}

impl Drop for Gpu {
    /// What follows gives back memory and kernels that work under way still uses.
    fn drop(&mut self) {
        // A failure is reported to whoever waits.
        let _ = self.bind("drop").and_then(|()| self.synchronize("drop"));
    }
}
