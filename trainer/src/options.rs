//! Where and how a run computes. None of it affects results.

use std::path::PathBuf;
use std::time::Duration;

use dropless_core::World;
use dropless_core::host::Simd;

use crate::backends::Transport;
use crate::stop;

/// A backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendKind {
    /// CPU threads.
    #[default]
    Host,
    /// Any GPU.
    Wgpu,
    /// An NVIDIA GPU.
    Cuda,
    /// wgpu and the host in lockstep, their bits compared after every op ([`dropless_core::lockstep`]).
    WgpuBesideHost,
    /// cuda and the host, likewise.
    CudaBesideHost,
}

/// Where a training run computes and writes.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Directory of the run: configuration, metrics and checkpoints.
    pub out: PathBuf,
    /// Resume from the newest complete checkpoint in `out`.
    pub resume: bool,
    /// The backend.
    pub backend: BackendKind,
    /// The GPU of the wgpu backend: an index or a part of its name; `DROPLESS_ADAPTER` or the best one if None.
    pub adapter: Option<String>,
    /// Ranks, of all processes.
    pub ranks: usize,
    /// The place of this process in its job, for the cuda backend; None for a single process.
    pub world: Option<World>,
    /// How rows are exchanged between the ranks of the cuda backend.
    pub transport: Transport,
    /// How long the ranks of the cuda backend wait for each other while none of them reads or writes files.
    pub timeout: Duration,
    /// Ranks that share one set of experts; all of them if None.
    pub expert_parallel: Option<usize>,
    /// Threads; 0 for one per core.
    pub threads: usize,
    /// Vector instructions; the best that the machine supports if None.
    pub simd: Option<Simd>,
    /// The file for a trace of one step of the first rank: the third that this run does, so that everything is compiled, or
    /// the last one where there are fewer. The other steps cost nothing more; if the file cannot be written, the run goes on.
    pub trace: Option<PathBuf>,
    /// What asks a training run to stop before its last step.
    pub stop: stop::Request,
}

impl Default for TrainOptions {
    /// One rank of the host in the current directory.
    fn default() -> Self {
        TrainOptions {
            out: PathBuf::new(),
            resume: false,
            backend: BackendKind::default(),
            adapter: None,
            ranks: 1,
            world: None,
            transport: Transport::Auto,
            timeout: Duration::from_secs(60),
            expert_parallel: None,
            threads: 0,
            simd: None,
            trace: None,
            stop: stop::Request::default(),
        }
    }
}

impl TrainOptions {
    /// Ranks that share one set of experts.
    pub fn expert_ranks(&self) -> usize {
        self.expert_parallel.unwrap_or(self.ranks)
    }
}
