//! Stands in for cuda, where the build leaves it out or the system does not support it.

use dropless_core::dry::Footprint;
use dropless_core::host::Host;
use dropless_core::{Caps, Error, NumericModel};

use super::Ranks;
use crate::error::Result;
use crate::options::TrainOptions;

const WHY: &str = if cfg!(feature = "cuda") {
    "for Linux only"
} else {
    "left out of this program, which was built without the feature cuda"
};

/// How rows are exchanged between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Whatever is there.
    #[default]
    Auto,
    /// NCCL.
    Nccl,
    /// CUDA peer-to-peer memory.
    Peer,
}

/// This process among the processes of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// This process.
    pub rank: usize,
    /// Processes of the job.
    pub ranks: usize,
}

impl World {
    /// What a launcher says in the environment; None when none started this process.
    ///
    /// # Errors
    /// None: a number that is none says nothing.
    pub fn from_environment() -> dropless_core::Result<Option<World>> {
        let number = |names: [&str; 2]| names.into_iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
        let rank = number(["RANK", "OMPI_COMM_WORLD_RANK"]).unwrap_or(0);
        Ok(number(["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"]).map(|ranks| World { rank, ranks }))
    }
}

pub(super) fn usable() -> bool {
    false
}

/// # Safety
/// None is needed.
pub(super) unsafe fn prepare_environment() {}

pub(super) fn footprint(_caps: &Caps) -> Footprint {
    Footprint::default()
}

pub(super) fn open(_options: &TrainOptions, _numerics: NumericModel, _host: Option<Vec<Host>>) -> Result<Ranks> {
    Err(Error::Unavailable { backend: "cuda", why: format!("{WHY}; use --backend host or wgpu") }.into())
}

pub(super) fn report(_check: impl Fn() -> String) -> Vec<String> {
    vec![format!("cuda  {WHY}")]
}
