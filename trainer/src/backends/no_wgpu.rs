//! Stands in for wgpu, where the build leaves it out.

use dropless_core::host::Host;
use dropless_core::{Caps, Error, NumericModel};

use super::Ranks;
use crate::error::Result;
use crate::options::TrainOptions;

const WHY: &str = "left out of this program, which was built without the feature wgpu";

pub(super) fn usable() -> bool {
    false
}

pub(super) fn in_host_memory(_caps: &Caps) -> bool {
    true
}

pub(super) fn open(_options: &TrainOptions, _numerics: NumericModel, _host: Option<Vec<Host>>) -> Result<Ranks> {
    Err(Error::Unavailable { backend: "wgpu", why: format!("{WHY}; use --backend host") }.into())
}

pub(super) fn report(_check: impl Fn(usize) -> String) -> Vec<String> {
    vec![format!("wgpu  {WHY}")]
}
