//! `dropless bisect`: where a backend leaves the bits of the host.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use dropless_core::Error as CoreError;

use super::{BackendName, Machine, say};
use crate::config::{Config, Numerics};
use crate::error::{Error, Result};
use crate::options::{BackendKind, TrainOptions};
use crate::train::steps_in_memory;

#[derive(Debug, Args)]
pub(super) struct BisectArgs {
    /// Configuration; keys that it leaves out are those of configs/default.toml
    config: Option<PathBuf>,
    #[command(flatten)]
    machine: Machine,
    /// Arithmetic of the matrix products [default: train.numerics]
    #[arg(long, value_enum)]
    numerics: Option<Numerics>,
    /// Training steps
    #[arg(long, default_value_t = 1, value_name = "N")]
    steps: u64,
    /// Change a key of the configuration, e.g. train.recipe='"mxfp8"'
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

pub(super) fn run(args: BisectArgs) -> Result<ExitCode> {
    let backend = match args.machine.backend {
        BackendName::Wgpu => BackendKind::WgpuBesideHost,
        BackendName::Cuda => BackendKind::CudaBesideHost,
        BackendName::Auto | BackendName::Host => {
            let what = "bisect compares a backend with the host: add --backend wgpu or --backend cuda";
            return Err(Error::Usage(what.into()));
        }
    };
    let mut config = Config::load(args.config.as_deref(), &args.set)?;
    if let Some(numerics) = args.numerics {
        config.train.numerics = numerics;
    }
    let options = args.machine.options(PathBuf::new(), false)?;
    // The host beside it has no ranks in other processes.
    let options = TrainOptions { backend, world: None, ..options };
    match steps_in_memory(&config, &options, args.steps) {
        Ok(digest) => {
            if let Some(digest) = digest {
                say(format_args!("no op differs from the host in {} steps; digest {digest}", args.steps));
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(Error::Core(CoreError::Device { what, op, .. })) if what.contains("differs from host") => {
            say(format_args!("{op}: {what}"));
            Ok(ExitCode::FAILURE)
        }
        Err(error) => Err(error),
    }
}
