//! `dropless record` and `dropless replay`: training steps on the wgpu backend, for other devices to run again.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::backends::recording::Recording;
use clap::Args;
use dropless_model::words::count;

use crate::config::{Config, Numerics};
use crate::error::{Error, Result};
use crate::options::{BackendKind, TrainOptions};
use crate::output::{report, say};
use crate::train::record;

#[derive(Debug, Args)]
pub(super) struct RecordArgs {
    /// Configuration; omitted keys have the values of configs/default.toml
    config: Option<PathBuf>,
    /// Training steps
    #[arg(long, default_value_t = 1, value_name = "N")]
    steps: u64,
    /// Directory of the recording; one that is there is replaced
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Arithmetic of the matrix products [default: train.numerics]
    #[arg(long, value_enum)]
    numerics: Option<Numerics>,
    /// GPU of the wgpu backend, by index or part of its name [default: DROPLESS_ADAPTER, or the best one]
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// Change a key of the configuration, e.g. train.recipe='"fp8-block"'
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

#[derive(Debug, Args)]
pub(super) struct ReplayArgs {
    /// Directory of the recording
    recording: PathBuf,
    /// GPU of the wgpu backend, by index or part of its name [default: DROPLESS_ADAPTER, or the best one]
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
}

pub(super) fn run(args: RecordArgs) -> Result<()> {
    if args.steps == 0 {
        return Err(Error::Usage("--steps is 0, expected 1 or more".into()));
    }
    let mut config = Config::load(args.config.as_deref(), &args.set)?;
    if let Some(numerics) = args.numerics {
        config.train.numerics = numerics;
    }
    let options = TrainOptions { backend: BackendKind::Wgpu, adapter: args.adapter, ..TrainOptions::default() };
    let (recording, bytes) = record(&config, &options, args.steps, &args.out)?;
    let header = &recording.header;
    say(format_args!(
        "{}: {}, {}, {:.1} MB; the device needs {:.0} MB of memory, buffers of {:.1} MB and bindings of {:.1} MB",
        args.out.display(),
        count(header.ops, "op"),
        count(header.pipelines, "pipeline"),
        bytes as f64 / 1e6,
        header.needs.memory as f64 / 1e6,
        header.needs.buffer as f64 / 1e6,
        header.needs.binding as f64 / 1e6,
    ));
    for (step, number) in header.steps.iter().zip(1..) {
        say(format_args!("training loss {:.4} at step {number}", f32::from_bits(step.loss.value)));
    }
    if let Some(state) = &header.state {
        say(format_args!("digest of weights and optimizer state {state}"));
    }
    say(format_args!("digest of the recording {}", header.digest));
    Ok(())
}

pub(super) fn replay(args: &ReplayArgs) -> Result<ExitCode> {
    let recording = Recording::read(&args.recording)?;
    say(format_args!("{}, recorded on {}", recording.header.title, recording.header.device));
    let replay = recording.replay(args.adapter.as_deref())?;
    say(format_args!("replayed on {}", replay.device));
    match &replay.difference {
        None => {
            say(format_args!("every op wrote what was recorded: digest {}", replay.digest));
            Ok(ExitCode::SUCCESS)
        }
        Some(difference) => {
            report(difference);
            say(format_args!("digest {}, recorded {}", replay.digest, recording.header.digest));
            Ok(ExitCode::FAILURE)
        }
    }
}
