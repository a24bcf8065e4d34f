//! Stands in for `record` and `replay`, where the build leaves wgpu out.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;

use crate::error::{Error, Result};

/// Whatever is given.
#[derive(Debug, Args)]
pub(super) struct RecordArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    any: Vec<OsString>,
}

pub(super) use RecordArgs as ReplayArgs;

pub(super) fn run(args: RecordArgs) -> Result<()> {
    replay(&args).map(|_| ())
}

pub(super) fn replay(_args: &ReplayArgs) -> Result<ExitCode> {
    let what = "recordings are of the wgpu backend, which this program was built without";
    Err(Error::Usage(what.into()))
}
