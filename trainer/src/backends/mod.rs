//! The backends of this program, and how to open them.
//!
//! wgpu and cuda are features of the build, and cuda is for Linux; one that is not there is refused with a line that
//! says so.

#[cfg(all(feature = "cuda", target_os = "linux", not(dropless_portable)))]
mod cuda;
#[cfg(not(all(feature = "cuda", target_os = "linux", not(dropless_portable))))]
mod no_cuda;
#[cfg(not(feature = "wgpu"))]
mod no_wgpu;
#[cfg(feature = "wgpu")]
mod wgpu;

#[cfg(feature = "wgpu")]
pub(crate) use wgpu::recording;

use std::time::Duration;

pub use cuda::Transport;
use dropless_core::dry::Footprint;
use dropless_core::host::{Host, HostOptions};
use dropless_core::lockstep::Lockstep;
use dropless_core::{Backend, Caps, NumericModel};
#[cfg(feature = "wgpu")]
pub(crate) use wgpu::open_recorded;

#[cfg(not(all(feature = "cuda", target_os = "linux", not(dropless_portable))))]
use self::no_cuda as cuda;
#[cfg(not(feature = "wgpu"))]
use self::no_wgpu as wgpu;
use crate::error::Result;
use crate::options::{BackendKind, TrainOptions};

/// How long a rank waits for the others: the first one writes the last of a large checkpoint alone. A rank that failed is
/// not waited for.
const PATIENCE: Duration = Duration::from_secs(1800);

/// The ranks that a process drives.
type Ranks = Vec<Box<dyn Backend>>;

/// Sets the environment variables that the libraries of the backends read, where they are not set.
///
/// # Safety
/// The process has no other thread yet.
pub unsafe fn prepare_environment() {
    // SAFETY: the caller's promise.
    unsafe { cuda::prepare_environment() };
}

/// Whether a backend is available here.
pub fn usable(backend: BackendKind) -> bool {
    match backend {
        BackendKind::Host => true,
        BackendKind::Wgpu | BackendKind::WgpuBesideHost => wgpu::usable(),
        BackendKind::Cuda | BackendKind::CudaBesideHost => cuda::usable(),
    }
}

/// A line for each device of wgpu and cuda, or why there is none. `check` says in what state the first one of a backend
/// is, or the adapter with an index.
pub(crate) fn report(check: impl Fn(BackendKind, Option<usize>) -> String) -> Vec<String> {
    let mut lines = wgpu::report(|adapter| check(BackendKind::WgpuBesideHost, Some(adapter)));
    lines.extend(cuda::report(|| check(BackendKind::CudaBesideHost, None)));
    lines
}

/// The ranks as they are or, with `host`, in lockstep with its ranks.
fn beside<B: Backend + 'static>(host: Option<Vec<Host>>, ranks: Vec<B>) -> Result<Ranks> {
    fn boxed<B: Backend + 'static>(ranks: Vec<B>) -> Ranks {
        ranks.into_iter().map(|rank| Box::new(rank) as Box<dyn Backend>).collect()
    }
    let Some(host) = host else { return Ok(boxed(ranks)) };
    let pairs = host.into_iter().zip(ranks).map(|(host, rank)| Lockstep::new(host, rank));
    Ok(boxed(pairs.collect::<dropless_core::Result<Vec<_>>>()?))
}

/// Where the tensors of a backend lie.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// What the device takes for them.
    pub footprint: Footprint,
    /// Whether its memory is that of the host.
    pub in_host_memory: bool,
    /// Bytes of the device, if it says.
    pub device_bytes: Option<u64>,
}

/// Where the tensors of an open backend lie.
pub fn place(backend: BackendKind, caps: &Caps) -> Place {
    let host = Place { footprint: Footprint::default(), in_host_memory: true, device_bytes: None };
    match backend {
        BackendKind::Host => host,
        BackendKind::Wgpu | BackendKind::WgpuBesideHost => Place { in_host_memory: wgpu::in_host_memory(caps), ..host },
        BackendKind::Cuda | BackendKind::CudaBesideHost => {
            Place { footprint: cuda::footprint(caps), in_host_memory: false, device_bytes: Some(caps.max_buffer_bytes) }
        }
    }
}

impl TrainOptions {
    fn host(&self, numerics: NumericModel) -> Result<Vec<Host>> {
        let options = HostOptions {
            numerics,
            threads: self.threads,
            simd: self.simd,
            expert_ranks: self.expert_parallel,
            timeout: PATIENCE,
            ..HostOptions::default()
        };
        Ok(Host::ranks(self.ranks, options)?)
    }

    /// Opens the ranks that this process drives: of host and wgpu all of them, of cuda one.
    ///
    /// # Errors
    /// [`dropless_core::Error::Unavailable`] when the backend is not available here.
    pub fn open_ranks(&self, numerics: NumericModel) -> Result<Vec<Box<dyn Backend>>> {
        let beside_host = matches!(self.backend, BackendKind::WgpuBesideHost | BackendKind::CudaBesideHost);
        let host = if beside_host { Some(self.host(numerics)?) } else { None };
        match self.backend {
            BackendKind::Host => beside(None, self.host(numerics)?),
            BackendKind::Wgpu | BackendKind::WgpuBesideHost => wgpu::open(self, numerics, host),
            BackendKind::Cuda | BackendKind::CudaBesideHost => cuda::open(self, numerics, host),
        }
    }

    /// Opens one rank, whatever the number of ranks says.
    ///
    /// # Errors
    /// As [`open_ranks`](TrainOptions::open_ranks).
    pub fn open_one(&self, numerics: NumericModel) -> Result<Box<dyn Backend>> {
        let one = TrainOptions { ranks: 1, world: None, expert_parallel: None, ..self.clone() };
        Ok(one.open_ranks(numerics)?.swap_remove(0))
    }
}
