//! `dropless doctor`: what this machine and this program offer, and whether it computes the right bits.

use std::fmt::Write;

use dropless_core::host::Simd;
use dropless_cuda::DeviceReport;
use dropless_wgpu::AdapterReport;

use crate::config::Config;
use crate::options::{BackendKind, TrainOptions};
use crate::train::steps_in_memory;

/// One line for each backend and adapter.
pub(super) fn report() -> String {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut out = format!("dropless {}\n", env!("CARGO_PKG_VERSION"));
    let simd: Vec<String> = Simd::ALL
        .iter()
        .map(|level| {
            let state = if !level.available() {
                "not on this machine"
            } else if *level == Simd::best() {
                "used"
            } else {
                "available"
            };
            format!("{} {state}", format!("{level:?}").to_lowercase())
        })
        .collect();
    // Writing to a string cannot fail.
    let _ = writeln!(out, "host  available: {threads} threads; {}", simd.join(", "));
    let adapters = dropless_wgpu::adapters();
    if adapters.is_empty() {
        let _ = writeln!(out, "wgpu  no adapter; install a Vulkan driver (mesa-vulkan-drivers has one for CPUs)");
    }
    for adapter in &adapters {
        let AdapterReport { index, name, api, kind, driver, max_buffer_bytes } = adapter;
        let state = check(BackendKind::WgpuBesideHost, Some(*index));
        let mib = max_buffer_bytes >> 20;
        let _ = writeln!(out, "wgpu  {index}: {name} ({api}, {kind}, {driver}; buffers up to {mib} MiB): {state}");
    }
    match dropless_cuda::devices() {
        Err(error) => {
            let _ = writeln!(out, "cuda  not here: {error}");
        }
        Ok(devices) => {
            for DeviceReport { index, name, capability: (major, minor), memory, refused } in devices {
                // The first one is the one that a single rank uses.
                let state = match refused {
                    Some(why) => format!("unusable: {why}"),
                    None if index == 0 => check(BackendKind::CudaBesideHost, None),
                    None => "available".into(),
                };
                let gib = memory >> 30;
                let _ = writeln!(out, "cuda  {index}: {name} (sm_{major}{minor}, {gib} GiB): {state}");
            }
            let _ = match dropless_cuda::kept_kernels() {
                Ok(directory) => writeln!(out, "cuda  compiled kernels are kept in {}", directory.display()),
                Err(why) => {
                    writeln!(out, "cuda  compiled kernels are not kept, which costs time at every start: {why}")
                }
            };
        }
    }
    out
}

/// A model that one step takes through every op of training in a moment.
const TINY: [&str; 10] = [
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.moe_intermediate_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=1",
    "model.n_routed_experts=4",
    "train.recipe=\"mxfp8\"",
    "train.sequence_length=16",
    "train.batch_size=4",
    "train.micro_batch_size=4",
];

/// Whether a backend computes the bits of the host in a training step.
fn check(backend: BackendKind, adapter: Option<usize>) -> String {
    let adapter = adapter.map(|index| index.to_string());
    let options = TrainOptions { backend, adapter, ..TrainOptions::default() };
    let step = || steps_in_memory(&Config::load(None, &TINY.map(str::to_owned))?, &options, 1);
    match step() {
        Ok(_) => "available, a training step has the bits of the host".into(),
        Err(error) => format!("unusable: {error}"),
    }
}
