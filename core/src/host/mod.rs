//! The host backend: runs each op's specification on CPU threads, in the caller's thread order.
//!
//! It defines the bits. Fast versions (SIMD chosen at run time, threads) give the same bits as the plain code in
//! `ops/` and `numerics/`, which the tests check. In-process ranks share one thread pool.

mod all_to_all;
mod attention;
mod group_quantize;
mod grouped_gemm;
mod map;
mod memory;
mod product;
mod route;
mod simd;

pub use simd::Simd;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Backend, Caps, Event, EventState, Queue, Timings, expert_ranks};
use crate::error::{Error, Result};
use crate::exchange::Exchange;
use crate::numerics::NumericModel;
use crate::ops::{AllToAll, Attention, Checked, GroupQuantize, GroupedGemm, Map, Offload, Route};
use crate::tensor::{DType, Memory, Tensor};
use crate::timeouts::Timeouts;

/// How a [`Host`] computes. None of it but `numerics` changes a bit.
#[derive(Clone, Copy, Debug)]
pub struct HostOptions {
    /// The arithmetic of the matrix products.
    pub numerics: NumericModel,
    /// Number of threads; 0 for one for each core.
    pub threads: usize,
    /// Vector instructions; the best of this machine if None.
    pub simd: Option<Simd>,
    /// Largest single buffer in bytes.
    pub max_buffer_bytes: u64,
    /// Ranks that share one set of experts; all of them if None.
    pub expert_ranks: Option<usize>,
    /// How long a rank waits for the others in a collective before it fails.
    pub timeout: Duration,
}

/// The largest [`HostOptions::threads`]: at least as many as a machine has cores, and few enough to start at once.
const MOST_THREADS: usize = 4096;

impl Default for HostOptions {
    fn default() -> Self {
        HostOptions {
            numerics: NumericModel::Hopper,
            threads: 0,
            simd: None,
            max_buffer_bytes: 1 << 40,
            expert_ranks: None,
            timeout: Duration::from_secs(60),
        }
    }
}

/// The CPU as a backend.
#[derive(Debug)]
pub struct Host {
    caps: Caps,
    simd: Simd,
    pool: Arc<rayon::ThreadPool>,
    exchange: Exchange,
}

/// Work on the host is done when its call returns, so an event has nothing to remember.
#[derive(Debug)]
struct Done;

impl EventState for Done {}

impl Host {
    /// One rank.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the threads cannot be had, or are more than 4096, or the machine lacks the asked-for
    /// instructions.
    pub fn new(options: HostOptions) -> Result<Host> {
        Ok(Host::ranks(1, options)?.remove(0))
    }

    /// `ranks` ranks in this process, each to be driven by a thread of its own.
    ///
    /// # Errors
    /// As [`new`](Host::new); [`Error::Argument`] when the ranks that share experts do not divide all ranks.
    pub fn ranks(ranks: usize, options: HostOptions) -> Result<Vec<Host>> {
        let unavailable = |why: String| Error::Unavailable { backend: "host", why };
        let simd = match options.simd {
            None => Simd::best(),
            Some(simd) if simd.available() => simd,
            Some(simd) => return Err(unavailable(format!("this machine has no {simd:?} instructions"))),
        };
        if options.threads > MOST_THREADS {
            return Err(unavailable(format!("{} threads asked for, expected at most {MOST_THREADS}", options.threads)));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads)
            .build()
            .map_err(|e| unavailable(format!("no threads: {e}")))?;
        let pool = Arc::new(pool);
        let expert_ranks = expert_ranks(ranks, options.expert_ranks)?;
        let device = format!("{} threads, {simd:?}", pool.current_num_threads()).to_lowercase();
        let caps = |rank| Caps {
            backend: "host",
            device: device.clone(),
            numerics: options.numerics,
            rank,
            ranks,
            expert_ranks,
            max_buffer_bytes: options.max_buffer_bytes,
            peak_flops: None,
            timeouts: Timeouts::default(),
        };
        let caps: Vec<Caps> = (0..ranks).map(caps).collect();
        let exchanges = Exchange::ranks(&caps, options.timeout);
        let host = |(caps, exchange)| Host { caps, simd, pool: pool.clone(), exchange };
        Ok(caps.into_iter().zip(exchanges).map(host).collect())
    }

    /// A tensor in memory of the caller; nothing is copied. `keep_alive` is dropped with the last view of it.
    ///
    /// # Shape
    /// Any; row-major and without gaps. `pointer` is aligned to an element, and not null even when there is none.
    ///
    /// # Errors
    /// [`Error::Argument`] when it is not, or when the shape passes the address space.
    ///
    /// # Safety
    /// Until `keep_alive` is dropped, the memory must be there to read and write, from any thread. While a call uses the
    /// tensor, nobody else may write there, nor read there what the call writes: other tensors of the same memory included,
    /// whose overlap no check sees.
    pub unsafe fn import(
        &self,
        pointer: *mut u8,
        shape: &[usize],
        dtype: DType,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> Result<Tensor> {
        // SAFETY: the caller's promise.
        unsafe { memory::import(pointer, shape, dtype, keep_alive) }
    }

    /// The vector instructions in use.
    pub fn simd(&self) -> Simd {
        self.simd
    }
}

impl Backend for Host {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        memory::alloc(dtype, shape, memory, self.caps.max_buffer_bytes)
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        dst.has_bytes("write", bytes.len())?;
        memory::output("write", dst)?.bytes().copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        src.has_bytes("read", bytes.len())?;
        bytes.copy_from_slice(memory::input("read", src)?.bytes());
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

    fn grouped_gemm(&self, op: &Checked<GroupedGemm<'_>>) -> Result<()> {
        self.pool.install(|| grouped_gemm::run(op, self.caps.numerics, self.simd))
    }

    fn group_quantize(&self, op: &Checked<GroupQuantize<'_>>) -> Result<()> {
        self.pool.install(|| group_quantize::run(op, self.simd))
    }

    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()> {
        all_to_all::run(&self.exchange, op)
    }

    fn offload(&self, op: &Checked<Offload<'_>>) -> Result<()> {
        let from = memory::input("offload", op.from)?;
        memory::output("offload", op.to)?.bytes().copy_from_slice(from.bytes());
        Ok(())
    }

    fn route(&self, op: &Checked<Route<'_>>) -> Result<()> {
        self.pool.install(|| route::run(op, self, self.simd))
    }

    fn attention(&self, op: &Checked<Attention<'_>>) -> Result<()> {
        self.pool.install(|| attention::run(op, self.caps.numerics, self.simd))
    }

    fn map(&self, op: &Checked<Map<'_>>) -> Result<()> {
        self.pool.install(|| map::run(op, self, self.simd))
    }
}
