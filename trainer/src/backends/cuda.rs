//! cuda: NVIDIA GPUs, one process per GPU.

use dropless_core::dry::Footprint;
use dropless_core::host::Host;
use dropless_core::{Caps, Error, NumericModel, World};
pub use dropless_cuda::Transport;
use dropless_cuda::{Cuda, CudaOptions, DeviceReport};

use super::{Ranks, beside};
use crate::error::Result;
use crate::options::TrainOptions;

pub(super) fn usable() -> bool {
    dropless_cuda::usable()
}

/// # Safety
/// The process has no other thread yet.
pub(super) unsafe fn prepare_environment() {
    // SAFETY: the caller's promise.
    unsafe { dropless_cuda::avoid_multicast() };
}

/// Blocks of the pool's sizes; rows through NCCL arrive beside where they go.
pub(super) fn footprint(caps: &Caps) -> Footprint {
    Footprint { block: dropless_cuda::block_bytes, staged_exchange: caps.ranks > 1 }
}

pub(super) fn open(options: &TrainOptions, numerics: NumericModel, host: Option<Vec<Host>>) -> Result<Ranks> {
    let TrainOptions { ranks, world, .. } = options;
    let started = world.as_ref().map_or(1, |world| world.ranks);
    if *ranks != started {
        let why = format!(
            "{ranks} ranks asked for, but {started} started: a GPU is one rank, in a process of its own \
             (dropless launch --nproc {ranks} -- ...)"
        );
        return Err(Error::Unavailable { backend: "cuda", why }.into());
    }
    world.as_ref().map_or(Ok(()), World::check_secret)?;
    let cuda = CudaOptions {
        numerics,
        device: world.as_ref().map_or(Ok(0), dropless_cuda::device_of)?,
        world: world.clone(),
        expert_ranks: options.expert_parallel,
        transport: options.transport,
        timeout: options.timeout,
        ..CudaOptions::default()
    };
    beside(host, vec![Cuda::new(&cuda)?])
}

pub(super) fn report(check: impl Fn() -> String) -> Vec<String> {
    let devices = match dropless_cuda::devices() {
        Ok(devices) => devices,
        Err(error) => return vec![format!("cuda  not here: {error}")],
    };
    let line = |device: DeviceReport| {
        let DeviceReport { index, name, capability: (major, minor), memory, refused } = device;
        // The first one is the one that a single rank uses.
        let state = match refused {
            Some(why) => format!("unusable: {why}"),
            None if index == 0 => check(),
            None => "available".into(),
        };
        let gib = memory >> 30;
        format!("cuda  {index}: {name} (sm_{major}{minor}, {gib} GiB): {state}")
    };
    let mut lines: Vec<String> = devices.into_iter().map(line).collect();
    lines.push(match dropless_cuda::kept_kernels() {
        Ok(directory) => format!("cuda  compiled kernels are kept in {}", directory.display()),
        Err(why) => format!("cuda  compiled kernels are not kept, which costs time at every start: {why}"),
    });
    lines
}
