//! The CUDA driver, with owned handles and typed errors.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::driver::{result, sys};
use dropless_core::launch::word;
use dropless_core::{Error, Result};
use parking_lot::Mutex;

use crate::BACKEND;
use crate::symbols::DRIVER;

/// A failure of the driver, in its own words.
pub(crate) fn failed(op: &'static str, error: &result::DriverError) -> Error {
    let text =
        |s: std::result::Result<&std::ffi::CStr, _>| s.map_or_else(|_| String::new(), |s| s.to_string_lossy().into());
    let what = format!("{} ({})", text(error.error_name()), text(error.error_string()));
    Error::Device { backend: BACKEND, op, what }
}

/// Names the op in a driver's result.
pub(crate) trait During<T> {
    /// The value, or [`Error::Device`] for `op`.
    fn during(self, op: &'static str) -> Result<T>;
}

impl<T> During<T> for std::result::Result<T, result::DriverError> {
    fn during(self, op: &'static str) -> Result<T> {
        self.map_err(|error| failed(op, &error))
    }
}

/// Loads the driver and looks for devices; says in one line what is missing.
pub(crate) fn init() -> Result<()> {
    let unavailable = |why: &str| Error::Unavailable { backend: BACKEND, why: why.into() };
    // SAFETY: only looks whether the library can be loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err(unavailable("no CUDA driver (libcuda) on this machine; use --backend host or wgpu"));
    }
    check_version().map_err(|why| unavailable(&why))?;
    result::init().map_err(|error| match error.0 {
        sys::cudaError_enum::CUDA_ERROR_NO_DEVICE => unavailable("the CUDA driver finds no device"),
        _ => unavailable(&format!("the CUDA driver does not start: {}", failed("init", &error))),
    })
}

/// The oldest version that has all that is called, and what runs the machine code of NVRTC 13. As CUDA counts, and as
/// NVIDIA numbers its drivers.
const OLDEST: (i32, &str) = (13000, "580");

/// Why this driver will not do, if it will not. Nothing is called of it but the version before it is known to be there.
fn check_version() -> std::result::Result<(), String> {
    // SAFETY: the library is there; a symbol of this name is a function of this type.
    let asked = unsafe { sys::culib().get::<unsafe extern "C" fn(*mut i32) -> sys::CUresult>(b"cuDriverGetVersion\0") };
    let Ok(ask) = asked else { return Err("libcuda is no driver: it has no cuDriverGetVersion".into()) };
    let mut version = 0;
    // SAFETY: writes one number.
    let answer = unsafe { ask(&mut version) };
    if answer != sys::cudaError_enum::CUDA_SUCCESS {
        return Err(format!("the driver does not say its version: {answer:?}"));
    }
    let number = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    let (found, oldest) = (number(version), format!("{} ({})", number(OLDEST.0), OLDEST.1));
    if version < OLDEST.0 {
        return Err(format!("the driver {found} is older than {oldest}; use --backend host or wgpu"));
    }
    // SAFETY: only looks whether there is a symbol of this name.
    let has = |name: &str| unsafe { sys::culib().get::<*const ()>(name.as_bytes()) }.is_ok();
    match DRIVER.missing(has) {
        None => Ok(()),
        Some(symbol) => Err(format!("the driver {found} is older than {oldest} or damaged: it has no {symbol}")),
    }
}

/// The handle that stands for another stream in each thread.
const PER_THREAD: usize = 2;

/// The primary context of a device.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: a context may be used from any thread that makes it current.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn retain(ordinal: i32) -> Result<Context> {
        let device = result::device::get(ordinal).during("open")?;
        // SAFETY: the device exists; released in `drop`.
        let raw = unsafe { result::primary_ctx::retain(device) }.during("open")?;
        Ok(Context { device, raw })
    }

    /// Makes the context the calling thread's.
    pub(crate) fn bind(&self, op: &'static str) -> Result<()> {
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(self.raw) }.during(op)
    }

    /// Fails unless work on `stream` is work in this context, in the order of the calls.
    pub(crate) fn check(&self, stream: &Stream) -> Result<()> {
        const OP: &str = "on_stream";
        let refused = |found: &str| {
            let expected = format!("a stream of the primary context of device {}", self.device);
            Err(Error::Argument { op: OP, field: "stream", expected, found: found.into() })
        };
        if stream.raw as usize == PER_THREAD {
            return refused("the default stream of each thread");
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the stream lives; writes one pointer.
        unsafe { sys::cuStreamGetCtx(stream.raw, &mut context) }.result().during(OP)?;
        if context == self.raw { Ok(()) } else { refused("one of another context") }
    }

    pub(crate) fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32> {
        // SAFETY: the device exists.
        unsafe { result::device::get_attribute(self.device, attribute) }.during("open")
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once. At the end of a process the driver may be gone already, which is no harm.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// What tells devices apart, whatever their index in a process.
pub(crate) type Uuid = [u8; 16];

/// The identity of a device.
pub(crate) fn uuid(device: sys::CUdevice) -> Result<Uuid> {
    Ok(bytemuck::cast(result::device::get_uuid(device).during("open")?.bytes))
}

/// Whether `context`'s device can map memory of the device with this identity. No, where this process does not see it.
pub(crate) fn reaches(context: &Context, other: &Uuid) -> Result<bool> {
    const OP: &str = "open";
    if context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)? == 0
    {
        return Ok(false);
    }
    for ordinal in 0..result::device::get_count().during(OP)? {
        let device = result::device::get(ordinal).during(OP)?;
        if uuid(device)? == *other {
            let mut reaches = 0;
            // SAFETY: both devices exist.
            unsafe { sys::cuDeviceCanAccessPeer(&mut reaches, context.device, device) }.result().during(OP)?;
            return Ok(reaches != 0);
        }
    }
    Ok(false)
}

/// A queue of the device.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) raw: sys::CUstream,
    /// Whether a caller made it, who destroys it, too.
    lent: bool,
}

// SAFETY: the driver locks a stream.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new() -> Result<Stream> {
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking).during("open")?;
        Ok(Stream { raw, lent: false })
    }

    /// A stream of the caller's.
    ///
    /// # Safety
    /// It outlives this.
    pub(crate) unsafe fn lent(handle: u64) -> Stream {
        Stream { raw: handle as sys::CUstream, lent: true }
    }

    pub(crate) fn synchronize(&self, op: &'static str) -> Result<()> {
        // SAFETY: the stream lives.
        unsafe { result::stream::synchronize(self.raw) }.during(op)
    }

    /// Whether the work queued here cannot be done any more. Not while it is recorded.
    pub(crate) fn has_failed(&self) -> bool {
        // SAFETY: the stream lives.
        let state = unsafe { sys::cuStreamQuery(self.raw) };
        !matches!(state, sys::cudaError_enum::CUDA_SUCCESS | sys::cudaError_enum::CUDA_ERROR_NOT_READY)
    }

    /// Whether the work queued here becomes a part of a graph.
    pub(crate) fn is_recorded(&self, op: &'static str) -> Result<bool> {
        // SAFETY: the stream lives.
        let status = unsafe { result::stream::is_capturing(self.raw) }.during(op)?;
        Ok(status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE)
    }

    /// Later work here starts after `event`.
    pub(crate) fn wait(&self, op: &'static str, event: &Event) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live.
        unsafe { result::stream::wait_event(self.raw, event.0, flags) }.during(op)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.lent {
            // SAFETY: created in `new`; the driver finishes its work first.
            let _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub(crate) struct Event(pub(crate) sys::CUevent);

// SAFETY: the driver locks an event.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// The present end of a stream.
    pub(crate) fn record(op: &'static str, stream: &Stream) -> Result<Event> {
        let event = Event(result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).during(op)?);
        event.move_to_end(op, stream)?;
        Ok(event)
    }

    /// An event that knows the time at which it is passed.
    pub(crate) fn timed(op: &'static str) -> Result<Event> {
        Ok(Event(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).during(op)?))
    }

    /// From now on the event is the present end of `stream`.
    pub(crate) fn move_to_end(&self, op: &'static str, stream: &Stream) -> Result<()> {
        // SAFETY: both live.
        unsafe { result::event::record(self.0, stream.raw) }.during(op)
    }

    /// Whether it has been passed.
    pub(crate) fn passed(&self, op: &'static str) -> Result<bool> {
        // SAFETY: the event lives.
        match unsafe { result::event::query(self.0) } {
            Err(result::DriverError(sys::cudaError_enum::CUDA_ERROR_NOT_READY)) => Ok(false),
            done => done.during(op).map(|()| true),
        }
    }

    /// Waits until it has been passed.
    pub(crate) fn synchronize(&self, op: &'static str) -> Result<()> {
        // SAFETY: the event lives.
        unsafe { result::event::synchronize(self.0) }.during(op)
    }

    /// Milliseconds from `start`, once both are passed.
    pub(crate) fn since(&self, op: &'static str, start: &Event) -> Result<f32> {
        // SAFETY: both live.
        unsafe { result::event::elapsed(start.0, self.0) }.during(op)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once; the driver keeps it until it is passed.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// A compiled kernel on the device.
#[derive(Debug)]
pub(crate) struct Function {
    raw: sys::CUfunction,
    module: sys::CUmodule,
    /// Bytes of dynamic shared memory that were asked for so far.
    shared: Mutex<u32>,
}

// SAFETY: a function may be launched from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Loads the kernel `name` of a cubin.
    ///
    /// # Safety
    /// `cubin` is a whole image that the compiler made.
    pub(crate) unsafe fn load(name: &'static str, cubin: &[u8]) -> Result<Function> {
        let symbol = std::ffi::CString::new(name).expect("a kernel's name has no zero");
        // SAFETY: the caller's promise.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }.during(name)?;
        // SAFETY: the module is loaded.
        match unsafe { result::module::get_function(module, symbol) }.during(name) {
            Ok(raw) => Ok(Function { raw, module, shared: Mutex::new(0) }),
            Err(error) => {
                // SAFETY: loaded above, and nobody else has it.
                let _ = unsafe { result::module::unload(module) };
                Err(error)
            }
        }
    }

    /// Allows `bytes` of dynamic shared memory.
    pub(crate) fn allow_shared(&self, op: &'static str, bytes: u32) -> Result<()> {
        let mut allowed = self.shared.lock();
        if bytes > *allowed {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let size = i32::try_from(bytes).expect("shared memory is small");
            // SAFETY: the function is loaded.
            unsafe { result::function::set_function_attribute(self.raw, attribute, size) }.during(op)?;
            *allowed = bytes;
        }
        Ok(())
    }

    /// Queues a run; `arguments` holds the kernel's one parameter.
    ///
    /// # Safety
    /// `arguments` is at least as long as the kernel's parameter, and the addresses in it are what the kernel expects.
    pub(crate) unsafe fn launch(
        &self,
        op: &'static str,
        stream: &Stream,
        blocks: u32,
        threads: u32,
        shared: u32,
        arguments: &[u64],
    ) -> Result<()> {
        let mut parameter = arguments.as_ptr().cast::<c_void>().cast_mut();
        // SAFETY: the caller's promise.
        unsafe {
            result::launch_kernel(
                self.raw,
                (blocks, 1, 1),
                (threads, 1, 1),
                shared,
                stream.raw,
                std::slice::from_mut(&mut parameter),
            )
        }
        .during(op)
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        // SAFETY: loaded once.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// Memory of the device, or pinned memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Device,
    Pinned,
}

/// The start of an allocation: an address of the device, or of pinned host memory (the same on both).
pub(crate) type Address = u64;

/// New memory; None when there is not enough.
pub(crate) fn allocate(kind: Kind, bytes: usize) -> Result<Option<Address>> {
    let address = match kind {
        // SAFETY: freed by `release`.
        Kind::Device => unsafe { result::malloc_sync(bytes) },
        // SAFETY: freed by `release`.
        Kind::Pinned => unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }.map(|p| p as Address),
    };
    match address {
        Err(result::DriverError(sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
        address => address.during("alloc").map(Some),
    }
}

/// Gives memory back.
///
/// # Safety
/// The address is from [`allocate`] with this kind, and given back once. The device's work with it is done, and nobody
/// uses it any more.
pub(crate) unsafe fn release(kind: Kind, address: Address) {
    // A failure here is an earlier one that someone else reports.
    let _ = match kind {
        // SAFETY: the caller's promise.
        Kind::Device => unsafe { result::free_sync(address) },
        // SAFETY: the caller's promise.
        Kind::Pinned => unsafe { result::free_host(address as *mut c_void) },
    };
}

/// Free and total bytes of the device.
pub(crate) fn memory_info() -> Result<(usize, usize)> {
    result::mem_get_info().during("alloc")
}

/// The device in whose memory an address lies; None for memory of the host, and for what the driver does not know.
pub(crate) fn device_of(op: &'static str, address: Address) -> Result<Option<sys::CUdevice>> {
    let (kind, device) = look_up(op, address)?;
    Ok((kind == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32).then_some(device))
}

/// Whether an address lies in memory that the driver allocated or that was registered with it.
pub(crate) fn knows(op: &'static str, address: Address) -> Result<bool> {
    Ok(look_up(op, address)?.0 != 0)
}

/// The kind and the device of the memory in which an address lies; kind 0 if the driver does not know it.
fn look_up(op: &'static str, address: Address) -> Result<(u32, sys::CUdevice)> {
    use sys::CUpointer_attribute as Attribute;
    let (mut kind, mut device) = (0u32, 0i32);
    let mut asked = [Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL];
    let mut answers = [(&raw mut kind).cast::<c_void>(), (&raw mut device).cast::<c_void>()];
    // Asking for one attribute at a time would be an error of the driver where it does not know the address.
    // SAFETY: as many attributes as places for them, each of 4 bytes; the address is looked up and not followed.
    unsafe { sys::cuPointerGetAttributes(word(asked.len()), asked.as_mut_ptr(), answers.as_mut_ptr(), address) }
        .result()
        .during(op)?;
    Ok((kind, device))
}

/// Queues a copy. The driver knows from the addresses where they lie.
///
/// # Safety
/// Both ranges are allocated until the copy is done.
pub(crate) unsafe fn copy(op: &'static str, stream: &Stream, to: Address, from: Address, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { sys::cuMemcpyAsync(to, from, bytes, stream.raw) }.result().during(op)
}

/// Queues the filling of bytes.
///
/// # Safety
/// The range is allocated until it is done.
pub(crate) unsafe fn fill(op: &'static str, stream: &Stream, to: Address, byte: u8, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { result::memset_d8_async(to, byte, bytes, stream.raw) }.during(op)
}

/// How a tensor map reads a matrix: a box of a row-major array of `RANK` dimensions, one to five, the fastest first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorMapShape<const RANK: usize> {
    pub(crate) element: sys::CUtensorMapDataType,
    pub(crate) element_bytes: u64,
    /// Extents in elements, the fastest first.
    pub(crate) extents: [usize; RANK],
    /// Extents of the box, the fastest first.
    pub(crate) tile: [usize; RANK],
    pub(crate) swizzle: sys::CUtensorMapSwizzle,
}

/// A tensor map, as the kernel's parameter holds it.
pub(crate) type TensorMap = [u64; 16];

/// Describes a matrix at `address` to the TMA (tensor memory accelerator). Elements outside are read as zero.
pub(crate) fn tensor_map<const RANK: usize>(
    op: &'static str,
    address: Address,
    shape: &TensorMapShape<RANK>,
) -> Result<TensorMap> {
    const { assert!(0 < RANK && RANK <= 5) };
    let extents = shape.extents.map(|extent| extent as u64);
    let tile = shape.tile.map(word);
    // Bytes from one entry to the next of every dimension but the fastest.
    let mut strides = extents;
    let mut stride = shape.element_bytes;
    for (next, extent) in strides.iter_mut().zip(extents) {
        stride *= extent;
        *next = stride;
    }
    let steps = [1u32; RANK];
    let mut map = MaybeUninit::<sys::CUtensorMap>::zeroed();
    // SAFETY: the driver writes the map; every array has `RANK` entries, of which it reads one less of the strides. What it
    // does not like of the address or the numbers it refuses; it follows no pointer but these.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            shape.element,
            word(RANK),
            address as *mut c_void,
            extents.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            shape.swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .during(op)?;
    // SAFETY: zeroed at first, and plain data.
    Ok(unsafe { map.assume_init() }.opaque)
}
