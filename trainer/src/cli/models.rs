//! Models on disk: which one a command means, `dropless convert` and `dropless inspect`.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use dropless_model::hf::config::CONFIG;
use dropless_model::hf::{Conversion, Experts, Inspection, ModelDir};
use dropless_model::words::count;
use safetensors::Dtype;

use super::runs;
use crate::checkpoint::{Checkpoint, STATE, newest};
use crate::error::{Error, Result};
use crate::output::{self, report, say};
use crate::source::Source;

/// A trained model.
#[derive(Debug, Args)]
pub(super) struct ModelArgs {
    /// A run's directory, a checkpoint, or a model directory (config.json and safetensors files) [default: the last run in
    /// out/]
    run: Option<PathBuf>,
    /// Configuration around the model of a model directory; keys that it leaves out have their defaults
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Change a key of the configuration, e.g. data.validation='["notes/*.txt"]'
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl ModelArgs {
    /// The model: a checkpoint's, the newest of a run, or a model directory's.
    pub(super) fn source(&self) -> Result<Source> {
        let is_model = |path: &&Path| path.join(CONFIG).exists() && !path.join(STATE).exists();
        if let Some(path) = self.run.as_deref().filter(is_model) {
            return Source::of_directory(path, self.config.as_deref(), &self.set);
        }
        if let Some(file) = &self.config {
            let file = file.display();
            return Err(Error::Usage(format!(
                "--config {file} is for a model directory, but a checkpoint has its own"
            )));
        }
        Source::of_checkpoint(&checkpoint(self.run.as_deref())?, &self.set)
    }
}

/// The checkpoint at `path`, which may be one or a run's directory; by default the newest of the last run.
fn checkpoint(path: Option<&Path>) -> Result<Checkpoint> {
    let run = match path {
        Some(path) if path.join(STATE).exists() => return Checkpoint::open(path),
        Some(path) => path.to_owned(),
        None => runs::last()?,
    };
    let found = newest(&run)?;
    found.notes.iter().for_each(output::tell);
    found.checkpoint.ok_or_else(|| Error::Usage(format!("{}: there is no checkpoint", run.display())))
}

#[derive(Debug, Args)]
pub(super) struct ConvertArgs {
    /// The model directory, or a checkpoint
    from: PathBuf,
    /// The directory to write; it must not exist
    out: PathBuf,
    /// How experts lie in the files [default: as they do]
    #[arg(long, value_enum)]
    experts: Option<ExpertsName>,
    /// Element type; selection biases are f32 in any case [default: as it is, but f32 for FP8 weights]
    #[arg(long, value_enum)]
    dtype: Option<DtypeName>,
    /// Largest size of a file, such as 5GB or 512MiB [default: the files as they are]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    shard_size: Option<u64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ExpertsName {
    /// A tensor for each matrix of each expert, as on the hub
    Separate,
    /// All experts of a layer in one tensor, as in the memory of transformers
    Fused,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DtypeName {
    /// binary32
    F32,
    /// bfloat16
    Bf16,
    /// binary16
    F16,
}

/// A number of bytes: digits and a unit.
fn size(text: &str) -> std::result::Result<u64, String> {
    const UNITS: [(&str, u64); 8] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("B", 1),
        ("", 1),
    ];
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = UNITS.iter().find(|(unit, _)| text[digits.len()..].trim().eq_ignore_ascii_case(unit));
    let bytes = digits.parse::<u64>().ok().zip(unit).and_then(|(n, (_, unit))| n.checked_mul(*unit));
    bytes.filter(|&n| n > 0).ok_or_else(|| "expected a number of bytes such as 5GB or 512MiB".to_owned())
}

pub(super) fn convert(args: &ConvertArgs) -> Result<()> {
    let from = open(&args.from)?;
    let conversion = Conversion {
        experts: args.experts.map(|experts| match experts {
            ExpertsName::Separate => Experts::Separate,
            ExpertsName::Fused => Experts::Fused,
        }),
        dtype: args.dtype.map(|dtype| match dtype {
            DtypeName::F32 => Dtype::F32,
            DtypeName::Bf16 => Dtype::BF16,
            DtypeName::F16 => Dtype::F16,
        }),
        shard_bytes: args.shard_size,
    };
    let done = dropless_model::hf::convert(&from, &args.out, &conversion)?;
    let (out, files) = (args.out.display(), done.files);
    say(format_args!(
        "{}, {} in {}: {out}",
        count(done.tensors, "tensor"),
        count(done.bytes, "byte"),
        count(files, "file")
    ));
    Ok(())
}

/// A model directory. What is ignored in it is said once.
fn open(path: &Path) -> Result<ModelDir> {
    let dir = ModelDir::open(path)?;
    dir.notes().iter().for_each(output::tell);
    Ok(dir)
}

#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    /// The model directory, or a checkpoint
    model: PathBuf,
}

pub(super) fn inspect(args: &InspectArgs) -> Result<()> {
    report(Inspection::of(&ModelDir::open(&args.model)?));
    Ok(())
}
