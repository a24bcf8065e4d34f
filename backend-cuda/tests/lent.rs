//! What a caller lends: its stream and its memory. Nothing is copied, nothing is let go early, and the stream is the
//! caller's own. A host function that waits holds the caller's stream where a test says so.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};
use dropless_core::ops::{Add, Fill, Offload};
use dropless_core::{Backend, DType, Error, Memory, Queue, Tensor};
use dropless_cuda::{Cuda, CudaOptions};

/// A user of the device beside the backend. One at a time: what a test does may wait for all work of the process, and so
/// for another test's held stream.
struct Caller {
    stream: sys::CUstream,
    device: sys::CUdevice,
    _alone: MutexGuard<'static, ()>,
}

/// Elements of a test's memory.
const LEN: usize = 64;

impl Caller {
    /// None where there is no device and `DROPLESS_REQUIRE` does not name cuda.
    fn open() -> Option<Caller> {
        static ONE: Mutex<()> = Mutex::new(());
        let alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let required = std::env::var("DROPLESS_REQUIRE").is_ok_and(|names| names.split(',').any(|name| name == "cuda"));
        match Cuda::new(&CudaOptions::default()) {
            Err(Error::Unavailable { why, .. }) if !required => {
                println!("skipped: {why}");
                return None;
            }
            opened => drop(opened.unwrap()),
        }
        let device = result::device::get(0).unwrap();
        // SAFETY: the device exists; released in `drop`.
        let context = unsafe { result::primary_ctx::retain(device) }.unwrap();
        // SAFETY: retained above.
        unsafe { result::ctx::set_current(context) }.unwrap();
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        Some(Caller { stream, device, _alone: alone })
    }

    fn backend(&self) -> Cuda {
        // SAFETY: no test keeps anything of the backend longer than the caller.
        unsafe { Cuda::on_stream(&CudaOptions::default(), self.stream as u64) }.unwrap()
    }

    /// Whether all that was queued on the stream is done.
    fn is_done(&self) -> bool {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap();
        // SAFETY: the stream and the event live.
        let done = unsafe {
            result::event::record(event, self.stream).unwrap();
            let done = result::event::query(event);
            result::event::destroy(event).unwrap();
            done
        };
        match done {
            Err(result::DriverError(sys::cudaError_enum::CUDA_ERROR_NOT_READY)) => false,
            done => {
                done.unwrap();
                true
            }
        }
    }

    fn wait(&self) {
        // SAFETY: the stream lives.
        unsafe { result::stream::synchronize(self.stream) }.unwrap();
    }

    /// Holds what is queued from now on until the gate opens.
    fn hold(&self) -> Gate {
        let gate = Gate(Arc::default());
        let argument = Arc::into_raw(gate.0.clone()).cast_mut().cast::<c_void>();
        // SAFETY: the stream lives, and the function takes over the reference it is given.
        unsafe { result::stream::launch_host_function(self.stream, pass, argument) }.unwrap();
        gate
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        // SAFETY: created in `open` and not destroyed by anyone else, which is one of the claims of this file.
        unsafe {
            result::stream::synchronize(self.stream).unwrap();
            result::stream::destroy(self.stream).unwrap();
            result::primary_ctx::release(self.device).unwrap();
        }
    }
}

/// Opens when it is dropped.
struct Gate(Arc<AtomicBool>);

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Waits for a gate, but not for ever.
unsafe extern "C" fn pass(gate: *mut c_void) {
    // SAFETY: from `Caller::hold`, which gave this reference away.
    let gate = unsafe { Arc::from_raw(gate.cast_const().cast::<AtomicBool>()) };
    let begun = Instant::now();
    while !gate.load(Ordering::Acquire) && begun.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Memory of the caller: f32 zeros.
struct Lent(sys::CUdeviceptr);

impl Lent {
    fn new() -> Lent {
        // SAFETY: freed in `drop`.
        let address = unsafe { result::malloc_sync(LEN * size_of::<f32>()) }.unwrap();
        // SAFETY: allocated above.
        unsafe { result::memset_d8_sync(address, 0, LEN * size_of::<f32>()) }.unwrap();
        // SAFETY: waits for the device.
        unsafe { sys::cuCtxSynchronize() }.result().unwrap();
        Lent(address)
    }

    /// What is there now, whatever is queued.
    fn values(&self) -> Vec<f32> {
        let mut values = vec![0f32; LEN];
        // SAFETY: allocated in `new`.
        unsafe { result::memcpy_dtoh_sync(&mut values, self.0) }.unwrap();
        values
    }

    /// All of it, and whether it has been let go.
    fn import(&self, cuda: &Cuda) -> (Tensor, Arc<AtomicBool>) {
        let let_go = Arc::new(AtomicBool::new(false));
        // SAFETY: every test waits for its work before the memory goes.
        let tensor = unsafe { cuda.import(self.0, &[LEN], DType::F32, Arc::new(Watched(let_go.clone()))) };
        (tensor.unwrap(), let_go)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`.
        unsafe { result::free_sync(self.0) }.unwrap();
    }
}

/// Says when it is dropped.
struct Watched(Arc<AtomicBool>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn fill(cuda: &Cuda, out: &Tensor, value: f32) {
    Fill { out, value }.run(cuda).unwrap();
}

#[test]
fn ops_run_on_the_stream_and_in_the_memory_of_the_caller() {
    let Some(caller) = Caller::open() else { return };
    let lent = Lent::new();
    let cuda = caller.backend();
    let before = cuda.usage();
    let (x, _) = lent.import(&cuda);
    fill(&cuda, &x, 1.0);
    caller.wait();
    assert_eq!(lent.values(), [1.0; LEN]);
    let gate = caller.hold();
    fill(&cuda, &x, 2.0);
    assert!(!caller.is_done());
    assert_eq!(lent.values(), [1.0; LEN], "the work went ahead of the stream");
    drop(gate);
    // Nobody waits for the backend.
    caller.wait();
    assert_eq!(lent.values(), [2.0; LEN]);
    assert_eq!(cuda.usage(), before, "memory was taken for a copy");
    assert_eq!((&cuda as &dyn Backend).download::<f32>(&x).unwrap(), [2.0; LEN]);
}

#[test]
fn memory_is_let_go_when_its_work_is_done() {
    let Some(caller) = Caller::open() else { return };
    let lent = Lent::new();
    let cuda = caller.backend();
    let (x, unused) = lent.import(&cuda);
    drop(x);
    assert!(unused.load(Ordering::Acquire), "nothing was queued");
    let (x, let_go) = lent.import(&cuda);
    fill(&cuda, &x, 1.0);
    caller.wait();
    let gate = caller.hold();
    fill(&cuda, &x, 2.0);
    let view = x.slice(1, 3).unwrap();
    drop(x);
    drop(view);
    // The next looks whether it is done.
    drop(lent.import(&cuda));
    assert!(!let_go.load(Ordering::Acquire));
    drop(gate);
    cuda.wait().unwrap();
    assert!(let_go.load(Ordering::Acquire));
    assert_eq!(lent.values(), [2.0; LEN]);
}

#[test]
fn memory_is_let_go_when_every_queue_is_done() {
    let Some(caller) = Caller::open() else { return };
    let lent = Lent::new();
    let cuda = caller.backend();
    let host = cuda.alloc(DType::F32, &[LEN], Memory::Host).unwrap();
    let (x, let_go) = lent.import(&cuda);
    fill(&cuda, &x, 1.0);
    caller.wait();
    let gate = caller.hold();
    fill(&cuda, &x, 3.0);
    cuda.wait_for(Queue::Offload, &cuda.record(Queue::Compute).unwrap()).unwrap();
    Offload { from: &x, to: &host }.run(&cuda).unwrap();
    drop(x);
    drop(lent.import(&cuda));
    assert!(!let_go.load(Ordering::Acquire));
    drop(gate);
    cuda.wait().unwrap();
    assert!(let_go.load(Ordering::Acquire));
    assert_eq!((&cuda as &dyn Backend).download::<f32>(&host).unwrap(), [3.0; LEN]);
}

#[test]
fn a_graph_keeps_the_memory_that_its_recording_let_go() {
    let Some(caller) = Caller::open() else { return };
    let lent = Lent::new();
    let cuda = caller.backend();
    let (x, let_go) = lent.import(&cuda);
    // Kernels are loaded before the recording.
    fill(&cuda, &x, 1.0);
    let mut graph = cuda
        .capture(|| {
            fill(&cuda, &x, 4.0);
            // SAFETY: the stream lives.
            let status = unsafe { result::stream::is_capturing(caller.stream) }.unwrap();
            assert_eq!(status, sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
            drop(x);
            Ok(())
        })
        .unwrap();
    cuda.wait().unwrap();
    assert!(!let_go.load(Ordering::Acquire));
    assert_eq!(lent.values(), [1.0; LEN]);
    graph.launch().unwrap();
    caller.wait();
    assert_eq!(lent.values(), [4.0; LEN]);
    drop(graph);
    cuda.wait().unwrap();
    assert!(let_go.load(Ordering::Acquire));
}

#[test]
fn f30_a_graph_keeps_the_memory_that_it_was_given() {
    let Some(caller) = Caller::open() else { return };
    let lent = Lent::new();
    let cuda = caller.backend();
    let (x, let_go) = lent.import(&cuda);
    fill(&cuda, &x, 1.0);
    let mut graph = cuda.capture(|| Fill { out: &x, value: 4.0 }.run(&cuda)).unwrap();
    drop(x);
    cuda.wait().unwrap();
    assert!(!let_go.load(Ordering::Acquire), "the graph writes there at every launch");
    graph.launch().unwrap();
    caller.wait();
    assert_eq!(lent.values(), [4.0; LEN]);
    drop(graph);
    cuda.wait().unwrap();
    assert!(let_go.load(Ordering::Acquire));
}

#[test]
fn the_last_to_go_waits() {
    let Some(caller) = Caller::open() else { return };
    let lent = Lent::new();
    let cuda = caller.backend();
    let ((x, of_x), (y, of_y)) = (lent.import(&cuda), lent.import(&cuda));
    fill(&cuda, &x, 1.0);
    caller.wait();
    let gate = caller.hold();
    fill(&cuda, &x, 5.0);
    fill(&cuda, &y.slice(0, 1).unwrap(), 6.0);
    drop(x);
    assert!(!of_x.load(Ordering::Acquire));
    drop(gate);
    drop(cuda);
    assert!(of_x.load(Ordering::Acquire), "the backend waits");
    assert!(!of_y.load(Ordering::Acquire), "the tensor is there");
    drop(y);
    assert!(of_y.load(Ordering::Acquire), "the tensor waits");
    assert_eq!(lent.values()[..2], [6.0, 5.0]);
    // The stream is there, and can be used and destroyed.
    assert!(caller.is_done());
}

#[test]
fn a_tensor_may_begin_anywhere() {
    let Some(caller) = Caller::open() else { return };
    let lent = Lent::new();
    let cuda = caller.backend();
    let import = |first: usize, shape: &[usize]| {
        let pointer = lent.0 + (first * size_of::<f32>()) as u64;
        // SAFETY: lies in the memory, which goes after the work.
        unsafe { cuda.import(pointer, shape, DType::F32, Arc::new(())) }.unwrap()
    };
    let (a, b, out) = (import(1, &[2, 8]), import(17, &[2, 8]), import(35, &[2, 8]));
    assert_eq!(out.shape(), [2, 8]);
    fill(&cuda, &a, 1.0);
    fill(&cuda, &b, 2.0);
    Add { a: &a, b: &b, c: None, out: &out }.run(&cuda).unwrap();
    caller.wait();
    let expected: Vec<f32> = (0..LEN)
        .map(|i| match i {
            1..17 => 1.0,
            17..33 => 2.0,
            35..51 => 3.0,
            _ => 0.0,
        })
        .collect();
    assert_eq!(lent.values(), expected);
    assert!(import(0, &[0, 3]).is_empty());
}

#[test]
fn what_cannot_be_lent_is_refused() {
    let Some(caller) = Caller::open() else { return };
    let lent = Lent::new();
    let cuda = caller.backend();
    let mine = [0f32; LEN];
    let refusal = |pointer, shape: &[usize]| {
        // SAFETY: refused.
        unsafe { cuda.import(pointer, shape, DType::F32, Arc::new(())) }.unwrap_err().to_string()
    };
    assert!(refusal(lent.0 + 2, &[1]).ends_with("expected a multiple of the 4 bytes of F32"));
    for host in [0, mine.as_ptr() as u64] {
        assert!(refusal(host, &[LEN]).ends_with("expected memory of device 0"));
    }
    assert!(refusal(lent.0, &[usize::MAX, 2]).contains("shape is [18446744073709551615, 2]"));
    // SAFETY: refused.
    let error = unsafe { Cuda::on_stream(&CudaOptions::default(), 2) }.unwrap_err().to_string();
    assert!(error.starts_with("on_stream: stream is the default stream of each thread"), "{error}");
}
