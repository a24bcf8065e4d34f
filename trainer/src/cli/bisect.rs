//! `dropless bisect`: where a backend leaves the bits of the host.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use dropless_core::Error as CoreError;
use dropless_model::words::count;

use super::{BackendName, Device, Ranks};
use crate::config::{Config, Numerics};
use crate::error::{Error, Result};
use crate::options::{BackendKind, TrainOptions};
use crate::output::{report, say};
use crate::train::steps_in_memory;

#[derive(Debug, Args)]
pub(super) struct BisectArgs {
    /// Configuration; omitted keys have the values of configs/default.toml
    config: Option<PathBuf>,
    #[command(flatten)]
    device: Device,
    #[command(flatten)]
    ranks: Ranks,
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
    let backend = match args.device.backend {
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
    let options = args.device.options(Some(&args.ranks))?;
    // The host beside it has no ranks in other processes.
    let options = TrainOptions { backend, world: None, ..options };
    conclude(steps_in_memory(&config, &options, args.steps), args.steps)
}

/// Says what came of the steps.
fn conclude(outcome: Result<Option<String>>, steps: u64) -> Result<ExitCode> {
    match outcome {
        Ok(digest) => {
            if let Some(digest) = digest {
                say(format_args!("no op differs from the host in {}; digest {digest}", count(steps, "step")));
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => match error.core() {
            Some(CoreError::Divergence(divergence)) => {
                report(divergence);
                Ok(ExitCode::FAILURE)
            }
            _ => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use dropless_core::fallback::Fallback;
    use dropless_core::host::{Host, HostOptions};
    use dropless_core::lockstep::Lockstep;
    use dropless_core::ops::Cast;
    use dropless_core::{Backend, DType, Memory};
    use dropless_tests::toy::Toy;

    use super::*;

    /// What a cast says that goes wrong beside the host.
    fn divergence() -> CoreError {
        let host = || Host::new(HostOptions { threads: 1, ..HostOptions::default() }).unwrap();
        let toy = Fallback::new(Toy::new(host().caps(), Some(1)), host(), &["cast"]).unwrap();
        let both = Lockstep::new(host(), toy).unwrap();
        let backend: &dyn Backend = &both;
        let x = backend.upload(DType::F32, &[1], &[1f32]).unwrap();
        let out = backend.alloc(DType::Bf16, &[1], Memory::Device).unwrap();
        Cast { x: &x, out: &out }.run(backend).unwrap_err()
    }

    #[test]
    fn only_an_op_with_other_bits_is_found() {
        let code = |outcome| conclude(outcome, 1).map(|code| format!("{code:?}")).map_err(|error| error.to_string());
        let [success, failure] = [ExitCode::SUCCESS, ExitCode::FAILURE].map(|code| Ok(format!("{code:?}")));
        assert_eq!(code(Ok(Some("d".into()))), success);
        assert_eq!(code(Err(divergence().into())), failure);
        assert_eq!(code(Err(Error::Step { step: 3, source: divergence() })), failure);
        let what = "differs from host".to_owned();
        let broken = CoreError::Device { backend: "wgpu", op: "cast", what };
        assert_eq!(code(Err(broken.into())), Err("wgpu: cast: differs from host".into()));
    }
}
