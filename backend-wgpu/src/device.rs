//! The device that the ranks of one process share: its queue, its limits, its compiled pipelines, and what went wrong.

use std::collections::HashMap;
use std::sync::Arc;

use dropless_core::launch::Variant;
use dropless_core::{Error, Result};
use parking_lot::Mutex;

use crate::BACKEND;
use crate::pipeline::Pipeline;
use crate::recording::Recorder;

/// Bytes of immediate data a dispatch may carry; every Vulkan driver has this much.
const IMMEDIATE_BYTES: u32 = 128;

/// Bytes that a shader can read at once. Buffers are made of whole ones.
pub(crate) const UNIT: usize = 16;

/// The first failure that no caller was there to receive.
type Failure = Arc<Mutex<Option<String>>>;

/// A device.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    /// Workgroups along one dimension of a dispatch.
    pub(crate) max_workgroups: u32,
    /// Whether the shaders run on processors.
    pub(crate) cpu: bool,
    /// The largest buffer, all of which one binding can show.
    pub(crate) max_buffer_bytes: u64,
    failure: Failure,
    /// What becomes of a shader's text before it is compiled.
    shader_patch: Option<fn(String) -> String>,
    /// Writes down what is queued.
    pub(crate) recorder: Option<Arc<Recorder>>,
    pipelines: Mutex<HashMap<Variant, Arc<Pipeline>>>,
    /// What stands where a shader could write a tensor, or read one, and there is none: a device refuses the same
    /// buffer for both.
    nothing: [wgpu::Buffer; 2],
}

impl Gpu {
    /// Opens an adapter.
    pub(crate) fn open(
        adapter: &wgpu::Adapter,
        shader_patch: Option<fn(String) -> String>,
        recorder: Option<Arc<Recorder>>,
    ) -> Result<Arc<Gpu>> {
        let unavailable = |why: String| Error::Unavailable { backend: BACKEND, why };
        let (name, offered) = (adapter.get_info().name, adapter.limits());
        if !adapter.features().contains(wgpu::Features::IMMEDIATES) || offered.max_immediate_size < IMMEDIATE_BYTES {
            return Err(unavailable(format!("{name}: needs {IMMEDIATE_BYTES} bytes of immediate data")));
        }
        // More than the defaults only where it lets larger tensors in.
        let defaults = wgpu::Limits::default();
        let limits = wgpu::Limits {
            max_buffer_size: offered.max_buffer_size.max(defaults.max_buffer_size),
            max_storage_buffer_binding_size: offered
                .max_storage_buffer_binding_size
                .max(defaults.max_storage_buffer_binding_size),
            max_immediate_size: IMMEDIATE_BYTES,
            ..defaults
        };
        let max_buffer_bytes = largest_buffer(&limits) / UNIT as u64 * UNIT as u64;
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("dropless"),
            required_features: wgpu::Features::IMMEDIATES,
            required_limits: limits.clone(),
            ..Default::default()
        };
        let (device, queue) =
            pollster::block_on(adapter.request_device(&descriptor)).map_err(|e| unavailable(format!("{name}: {e}")))?;

        let failure = Failure::default();
        let first = failure.clone();
        device.on_uncaptured_error(Arc::new(move |error| {
            first.lock().get_or_insert_with(|| one_line(&error.to_string()));
        }));
        let first = failure.clone();
        device.set_device_lost_callback(move |reason, message| {
            first.lock().get_or_insert_with(|| format!("device lost ({reason:?}): {}", one_line(&message)));
        });
        let nothing = [(); 2].map(|()| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("nothing"),
                size: UNIT as u64,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            })
        });
        if let Some(recorder) = &recorder {
            recorder.attach(&device, &queue)?;
        }
        Ok(Arc::new(Gpu {
            device,
            queue,
            max_workgroups: limits.max_compute_workgroups_per_dimension,
            // A recording is run anywhere.
            cpu: adapter.get_info().device_type == wgpu::DeviceType::Cpu && recorder.is_none(),
            max_buffer_bytes,
            failure,
            shader_patch,
            recorder,
            pipelines: Mutex::default(),
            nothing,
        }))
    }

    /// Fails once anything has failed: what follows a failure cannot be trusted.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        match &*self.failure.lock() {
            Some(what) => Err(Error::Device { backend: BACKEND, op, what: what.clone() }),
            None => Ok(()),
        }
    }

    /// Waits until everything submitted so far is done.
    pub(crate) fn wait(&self, op: &'static str) -> Result<()> {
        let failed = |e: wgpu::PollError| Error::Device { backend: BACKEND, op, what: e.to_string() };
        self.device.poll(wgpu::PollType::wait_indefinitely()).map_err(failed)?;
        self.check(op)
    }

    /// A buffer of at least a unit, or a typed error when the memory is not there. Nobody asks for more than the
    /// `max_buffer_bytes` of a tensor.
    pub(crate) fn buffer(&self, op: &'static str, bytes: u64, usage: wgpu::BufferUsages) -> Result<wgpu::Buffer> {
        let size = bytes.next_multiple_of(UNIT as u64).max(UNIT as u64);
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let descriptor = wgpu::BufferDescriptor { label: Some(op), size, usage, mapped_at_creation: false };
        let buffer = self.device.create_buffer(&descriptor);
        match pollster::block_on(scope.pop()) {
            // How much is left, the interface does not tell.
            Some(_) => {
                Err(Error::Capacity { op, needed: bytes, available: 0, hint: "the device is out of memory".into() })
            }
            None => Ok(buffer),
        }
    }

    /// What stands where a shader could read (or write) a tensor that is not there.
    pub(crate) fn nothing(&self, read: bool) -> &wgpu::Buffer {
        &self.nothing[usize::from(read)]
    }

    /// The compiled pipeline of a variant, and whether this is its first use.
    pub(crate) fn pipeline(&self, variant: &Variant) -> Result<(Arc<Pipeline>, bool)> {
        // Ranks come here with the same variants at the same time: one makes it, the others wait.
        let mut pipelines = self.pipelines.lock();
        if let Some(pipeline) = pipelines.get(variant) {
            return Ok((pipeline.clone(), false));
        }
        let compiled = Pipeline::compile(&self.device, variant, self.shader_patch);
        let what = |error: wgpu::Error| one_line(&error.to_string());
        let failed = |error| Error::Device { backend: BACKEND, op: variant.program.name, what: what(error) };
        let pipeline = Arc::new(compiled.map_err(failed)?);
        pipelines.insert(*variant, pipeline.clone());
        Ok((pipeline, true))
    }
}

/// Bytes of the largest buffer, all of which one binding can show.
pub(crate) fn largest_buffer(limits: &wgpu::Limits) -> u64 {
    limits.max_buffer_size.min(limits.max_storage_buffer_binding_size)
}

/// A driver's message without its line breaks.
fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}
