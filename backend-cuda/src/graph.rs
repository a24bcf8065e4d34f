//! Work recorded once and run again: CUDA graphs.
//!
//! No op waits for the device or reads its memory, so any sequence of them can be recorded. The tensors it works on keep
//! their addresses; what they hold may differ each time.

use std::sync::Arc;

use cudarc::driver::{result, sys};
use dropless_core::{Queue, Result};

use crate::device::Gpu;
use crate::driver::{During, Event, Kind};
use crate::pool::Pools;

/// A recorded piece of work, with everything that it touches: the memory of its intermediate results, the tensors that it
/// was given, and the connections of its exchanges.
#[derive(Debug)]
pub struct Graph {
    executable: sys::CUgraphExec,
    /// What the recorded work uses. Goes before the device, whose context it needs to give memory back.
    _memory: Pools,
    gpu: Arc<Gpu>,
}

// SAFETY: the driver allows any thread to launch a graph; `launch` takes it one at a time.
unsafe impl Send for Graph {}

const OP: &str = "graph";

impl Graph {
    /// Records what `work` queues, without running it.
    pub(crate) fn record(gpu: &Arc<Gpu>, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        gpu.bind(OP)?;
        // The graph finds no use for what is kept outside of it.
        gpu.trim(OP, Kind::Device)?;
        let memory = Pools::new();
        let stream = gpu.stream(Queue::Compute);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        *gpu.capture.lock() = Some(memory.clone());
        // SAFETY: the stream lives.
        let begun = unsafe { result::stream::begin_capture(stream.raw, mode) }.during(OP);
        let worked = begun.and_then(|()| work()).and_then(|()| {
            // The other streams' work belongs to the graph; it ends where they come together.
            [Queue::Comm, Queue::Offload].into_iter().try_for_each(|queue| join(gpu, queue))
        });
        // SAFETY: begun above.
        let graph = unsafe { result::stream::end_capture(stream.raw) }.during(OP);
        *gpu.capture.lock() = None;
        worked?;
        let graph = graph?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was recorded above and is destroyed once.
        unsafe {
            let made = sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result().during(OP);
            let _ = result::graph::destroy(graph);
            made?;
        }
        Ok(Graph { executable, _memory: memory, gpu: gpu.clone() })
    }

    /// Queues the recorded work.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn launch(&mut self) -> Result<()> {
        let launched = self.gpu.bind(OP).and_then(|()| {
            // SAFETY: the executable lives as long as `self`, and so does all that its work uses: `memory` holds the blocks
            // that the recording made, every buffer whose address an op took during it (`memory::addresses` is the only way
            // to one), and the channels of its exchanges; kernels stay loaded as long as `gpu`. On a caller's stream, which
            // `Cuda::on_stream` is promised for as long as there are graphs, this holds, too.
            unsafe { result::graph::launch(self.executable, self.gpu.stream(Queue::Compute).raw) }.during(OP)
        });
        self.gpu.blame(launched)
    }
}

/// Lets the compute stream wait for a stream that takes part in the recording.
fn join(gpu: &Gpu, queue: Queue) -> Result<()> {
    let stream = gpu.stream(queue);
    if stream.is_recorded(OP)? {
        gpu.stream(Queue::Compute).wait(OP, &Event::record(OP, stream)?)?;
    }
    Ok(())
}

impl Drop for Graph {
    fn drop(&mut self) {
        // A failure here is an earlier one that someone else reports.
        let _ = self.gpu.bind(OP).and_then(|()| self.gpu.synchronize(OP));
        // SAFETY: instantiated once, and the device is done with it.
        let _ = unsafe { result::graph::exec_destroy(self.executable) };
    }
}
