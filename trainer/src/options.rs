//! Where and how a run computes. None of it changes a bit of the result.

use std::path::PathBuf;

use dropless_core::host::Simd;

/// Where a training run computes and writes.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Directory of the run: configuration, metrics and checkpoints.
    pub out: PathBuf,
    /// Continue from the newest complete checkpoint in `out`.
    pub resume: bool,
    /// In-process ranks.
    pub ranks: usize,
    /// Threads; 0 for one for each core.
    pub threads: usize,
    /// Vector instructions; the best of the machine if None.
    pub simd: Option<Simd>,
}
