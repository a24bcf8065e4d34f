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
