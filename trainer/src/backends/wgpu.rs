//! wgpu: any GPU.

use std::sync::Arc;

use dropless_core::host::Host;
use dropless_core::{Backend, Caps, NumericModel};
pub(crate) use dropless_wgpu::recording;
use dropless_wgpu::{AdapterReport, Wgpu, WgpuOptions};

use super::{PATIENCE, Ranks, beside};
use crate::error::Result;
use crate::options::TrainOptions;

pub(super) fn usable() -> bool {
    !dropless_wgpu::adapters().is_empty()
}

/// Whether the adapter is a CPU, or a GPU without memory of its own.
pub(super) fn in_host_memory(caps: &Caps) -> bool {
    let of_host = |adapter: &AdapterReport| matches!(adapter.kind.as_str(), "Cpu" | "IntegratedGpu");
    dropless_wgpu::adapters().iter().any(|adapter| of_host(adapter) && caps.device.starts_with(&adapter.name))
}

pub(super) fn open(options: &TrainOptions, numerics: NumericModel, host: Option<Vec<Host>>) -> Result<Ranks> {
    let wgpu = WgpuOptions {
        numerics,
        adapter: options.adapter.clone(),
        expert_ranks: options.expert_parallel,
        timeout: PATIENCE,
        ..WgpuOptions::default()
    };
    beside(host, Wgpu::ranks(options.ranks, &wgpu)?)
}

/// One rank, of which a recorder writes down what it does.
pub(crate) fn open_recorded(
    options: &TrainOptions,
    numerics: NumericModel,
    recorder: &Arc<recording::Recorder>,
) -> Result<Box<dyn Backend>> {
    let recorder = Some(recorder.clone());
    let wgpu = WgpuOptions { numerics, adapter: options.adapter.clone(), recorder, ..WgpuOptions::default() };
    Ok(Box::new(Wgpu::new(&wgpu)?))
}

pub(super) fn report(check: impl Fn(usize) -> String) -> Vec<String> {
    let adapters = dropless_wgpu::adapters();
    if adapters.is_empty() {
        return vec!["wgpu  no adapter; install a Vulkan driver (mesa-vulkan-drivers has one for CPUs)".into()];
    }
    let line = |adapter: &AdapterReport| {
        let AdapterReport { index, name, api, kind, driver, max_buffer_bytes } = adapter;
        let (mib, state) = (max_buffer_bytes >> 20, check(*index));
        format!("wgpu  {index}: {name} ({api}, {kind}, {driver}; buffers up to {mib} MiB): {state}")
    };
    adapters.iter().map(line).collect()
}
