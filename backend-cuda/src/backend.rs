//! The backend: memory and queues, and the ops handed to their files.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use dropless_core::backend::{EventState, expert_ranks};
use dropless_core::ops::{AllToAll, Attention, GroupQuantize, GroupedGemm, Map, Offload, Route};
use dropless_core::trace::LaunchClock;
use dropless_core::{
    Backend, Caps, Checked, DType, Error, Event, Memory, NumericModel, Queue, Result, Tensor, Timeouts, Timings, World,
};

use crate::BACKEND;
use crate::comm::{Comm, Transport};
use crate::device::Gpu;
use crate::driver;
use crate::graph::Graph;
use crate::loans::Loans;
use crate::memory;
use crate::ops::{all_to_all, attention, group_quantize, grouped_gemm, map, route};
use crate::timer::{Timer, Work};

/// How a [`Cuda`] is opened.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// The arithmetic of the matrix products: `Hopper`, or `F32` for validation.
    pub numerics: NumericModel,
    /// Index of the device.
    pub device: usize,
    /// This process among those of a job; None for a single rank.
    pub world: Option<World>,
    /// Ranks that share one set of experts; all of them if None.
    pub expert_ranks: Option<usize>,
    /// How rows travel between the ranks.
    pub transport: Transport,
    /// The longest that the ranks wait for each other while none has [suspended](Timeouts) this. When one fails, exits,
    /// stops responding or never joins, all of them have failed within this time. A process that cannot, because it is busy
    /// or a call of a driver does not return, is ended with code 1, or by a signal a second later.
    pub timeout: Duration,
    /// Wait after every launch, so that a failure shows at the call that caused it. For finding faults; slow.
    pub synchronous: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions {
            numerics: NumericModel::Hopper,
            device: 0,
            world: None,
            expert_ranks: None,
            transport: Transport::Auto,
            timeout: Duration::from_secs(60),
            synchronous: std::env::var_os("DROPLESS_CUDA_SYNC").is_some(),
        }
    }
}

/// An NVIDIA GPU as a backend. Besides [`Backend::read`] and [`Backend::wait`], two calls can wait for the device:
/// [`Backend::write`] to host memory, and [`Backend::alloc`] where what the pool keeps for other sizes must be given back.
#[derive(Debug)]
pub struct Cuda {
    caps: Caps,
    timer: Timer,
    /// Takes leave of the other ranks, or breaks off what they do not end, before the next waits.
    comm: Arc<Comm>,
    loans: Arc<Loans>,
    gpu: Arc<Gpu>,
}

impl EventState for driver::Event {}

impl Cuda {
    /// One rank; waits for the others of its job.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is no such device, it is not of compute capability 9.0, or a library is missing;
    /// [`Error::Argument`] when the ranks that share experts do not divide all ranks; [`Error::Collective`] when the ranks
    /// do not come together.
    pub fn new(options: &CudaOptions) -> Result<Cuda> {
        Cuda::open(options, None)
    }

    /// One rank whose compute queue is the caller's `stream` (a `CUstream` or `cudaStream_t`; 0 is the legacy default stream):
    /// ops run in order with what else is queued there, and neither waits for the host. The other two queues have streams of
    /// their own, which events order with this one as ever. The stream stays the caller's and is not destroyed.
    ///
    /// Calls make the device's primary context, in which the runtime API works, too, the calling thread's.
    ///
    /// What the caller captures by itself on `stream` would not know of the memory that ops take and give back; use
    /// [`capture`](Cuda::capture), which the legacy default stream does not allow.
    ///
    /// # Errors
    /// As [`new`](Cuda::new); [`Error::Argument`] for a stream of another context, and for the handle of the default stream
    /// of each thread, which is another one wherever a call comes from.
    ///
    /// # Safety
    /// `stream` is a stream of this process. It lives until the backend, its tensors, its events and its graphs are gone.
    pub unsafe fn on_stream(options: &CudaOptions, stream: u64) -> Result<Cuda> {
        // SAFETY: the caller's promise is about everything that holds the device, which holds this.
        let stream = unsafe { driver::Stream::lent(stream) };
        Cuda::open(options, Some(stream))
    }

    fn open(options: &CudaOptions, compute: Option<driver::Stream>) -> Result<Cuda> {
        if options.numerics == NumericModel::Blackwell {
            let why = "the Blackwell model needs another card; use the host".into();
            return Err(Error::Unavailable { backend: BACKEND, why });
        }
        options.world.as_ref().map_or(Ok(()), World::check_secret)?;
        let gpu = Gpu::open(options.device, options.synchronous, compute)?;
        let (rank, ranks) = options.world.as_ref().map_or((0, 1), |world| (world.rank, world.ranks));
        let mut caps = Caps {
            backend: BACKEND,
            device: gpu.name.clone(),
            numerics: options.numerics,
            rank,
            ranks,
            expert_ranks: expert_ranks(ranks, options.expert_ranks)?,
            max_buffer_bytes: gpu.memory_bytes,
            peak_flops: Some(gpu.peak_flops()),
            timeouts: Timeouts::default(),
        };
        let comm = Arc::new(Comm::open(&gpu, &caps, options.world.as_ref(), options.transport, options.timeout)?);
        caps.timeouts = Timeouts::new(Arc::new(comm.busy()));
        let loans = Loans::new(&gpu);
        Ok(Cuda { caps, timer: Timer::default(), comm, loans, gpu })
    }

    /// Records what `work` queues on this backend, without running it. The recorded work reads and writes the tensors
    /// that `work` was given, at every launch. The graph owns all that it uses: tensors that `work` makes, and a share of
    /// those that it was given, which therefore may be dropped before a launch. A tensor that `work` made and gave out waits
    /// for the device when it goes.
    ///
    /// # Errors
    /// Those of `work`; a failure of the device.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.gpu.blame(Graph::record(&self.gpu, work))
    }

    /// The caller's memory at `pointer` as a tensor of this backend. Nothing is copied.
    ///
    /// `keep_alive` is dropped after the tensor and its clones and views, once the work that was queued on them is done. No
    /// call waits for that: it is looked at when an imported tensor comes or goes and in [`Backend::wait`] and
    /// [`Backend::read`], on the thread of that call; at the latest when the backend goes, which waits. A tensor that goes
    /// later than its backend waits, too. What a recording works on is kept by its [`Graph`], too, until that goes.
    ///
    /// # Shape
    /// Row-major and without gaps; `pointer` is a multiple of the element's size. The ops are fastest at multiples of 16 bytes.
    ///
    /// # Errors
    /// [`Error::Argument`] when it is no such multiple, not in the memory of this device, or larger than that.
    ///
    /// # Safety
    /// - The memory holds the whole tensor until `keep_alive` is dropped.
    /// - Work that the caller queued with the memory is done, or is on the stream of [`on_stream`](Cuda::on_stream), or the
    ///   compute queue waits for it. The caller's later work with it comes after this backend's in the same way.
    /// - Where tensors are imported from memory that overlaps, an op writes none that it uses beside another of them.
    pub unsafe fn import(
        &self,
        pointer: u64,
        shape: &[usize],
        dtype: DType,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> Result<Tensor> {
        // SAFETY: the caller's promise.
        let imported = unsafe { memory::import(&self.gpu, &self.loans, pointer, shape, dtype, keep_alive) };
        self.gpu.blame(imported)
    }

    /// Bytes of device memory that came from the driver, and bytes of the tensors that live.
    pub fn usage(&self) -> (u64, u64) {
        self.gpu.usage()
    }
}

impl Backend for Cuda {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        self.gpu.blame(memory::alloc(&self.gpu, dtype, shape, memory))
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        const OP: &str = "write";
        dst.has_bytes(OP, bytes.len())?;
        self.gpu.blame(memory::write(OP, &self.gpu, dst, bytes))
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        const OP: &str = "read";
        src.has_bytes(OP, bytes.len())?;
        let read = memory::read(OP, &self.gpu, src, bytes);
        // A collective that failed is the reason of whatever else did.
        self.comm.check(OP)?;
        self.loans.settle();
        self.gpu.blame(read)
    }

    fn wait(&self) -> Result<()> {
        const OP: &str = "wait";
        let waited = self.comm.wait(OP);
        self.loans.settle();
        waited
    }

    fn timings(&self) -> Result<Option<Timings>> {
        self.gpu.blame(self.timer.take(&self.gpu)).map(Some)
    }

    fn launch_clock(&self) -> Option<&dyn LaunchClock> {
        Some(&*self.gpu)
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        const OP: &str = "record";
        let recorded = self.gpu.bind(OP).and_then(|()| driver::Event::record(OP, self.gpu.stream(queue)));
        Ok(Event(Arc::new(self.gpu.blame(recorded)?)))
    }

    fn wait_for(&self, queue: Queue, event: &Event) -> Result<()> {
        const OP: &str = "wait_for";
        let any: &dyn std::any::Any = &*event.0;
        let event = any.downcast_ref().ok_or(Error::ForeignTensor { op: OP, backend: BACKEND })?;
        self.gpu.blame(self.gpu.bind(OP).and_then(|()| self.gpu.stream(queue).wait(OP, event)))
    }

    fn grouped_gemm(&self, op: &Checked<GroupedGemm<'_>>) -> Result<()> {
        self.timer.time(&self.gpu, Work::Gemm, || grouped_gemm::run(&self.gpu, op, self.caps.numerics))
    }

    fn group_quantize(&self, op: &Checked<GroupQuantize<'_>>) -> Result<()> {
        self.timer.time(&self.gpu, Work::Gemm, || group_quantize::run(&self.gpu, op))
    }

    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()> {
        self.timer.time(&self.gpu, Work::Exchange(op.group), || all_to_all::run(&self.gpu, &self.comm, op))
    }

    fn offload(&self, op: &Checked<Offload<'_>>) -> Result<()> {
        self.gpu.blame(self.gpu.copy("offload", op.from, op.to, Queue::Offload))
    }

    fn route(&self, op: &Checked<Route<'_>>) -> Result<()> {
        self.timer.time(&self.gpu, Work::Other, || route::run(&self.gpu, op))
    }

    fn attention(&self, op: &Checked<Attention<'_>>) -> Result<()> {
        self.timer.time(&self.gpu, Work::Attention, || attention::run(&self.gpu, op, self.caps.numerics))
    }

    fn map(&self, op: &Checked<Map<'_>>) -> Result<()> {
        self.timer.time(&self.gpu, Work::Other, || map::run(&self.gpu, op))
    }
}
