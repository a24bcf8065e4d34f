//! Training steps that are written down as they are queued, for other devices to run again.

use std::path::Path;

use crate::backends::recording::{Recorder, Recording};
use dropless_core::Error as CoreError;
use dropless_model::words::count;

use super::in_memory::{At, on_rank};
use super::inputs::Scales;
use crate::backends;
use crate::config::Config;
use crate::data::Texts;
use crate::error::{Error, Result};
use crate::options::TrainOptions;

/// Records the initial weights and so many steps on the wgpu backend, and writes the recording to `out`. Returns it, and
/// the bytes of its files.
///
/// # Errors
/// A configuration or text that does not fit, failures of the backend, and a directory that cannot be written.
pub fn record(config: &Config, options: &TrainOptions, steps: u64, out: &Path) -> Result<(Recording, u64)> {
    Recording::check_place(out)?;
    config.check(1, 1)?;
    config.check_initial()?;
    config.check_data()?;
    let text = Texts::load(config)?.train;
    let recorder = Recorder::new();
    let backend = backends::open_recorded(options, config.train.numerics.into(), &recorder)?;
    recorder.section("initial state");
    let (mut step, mut seen) = (0, 0);
    let at = |at: At<'_>| {
        match at {
            At::Step(number) => {
                step = number;
                recorder.section(&format!("step {step}: gradients"));
            }
            At::Gradients(batch, result) => {
                let reads = recorder.reads();
                // The sums of the losses, the norm, and the counts of each MoE layer.
                let counts = match &reads[seen..] {
                    [_, _, counts @ ..] if counts.len() == result.counts.len() => counts,
                    _ => return Err(misread(step)),
                };
                let layers = result.counts.iter().map(Vec::len);
                let load: Vec<_> = counts.iter().copied().zip(layers).collect();
                let scale = Scales::new(batch, None).loss;
                recorder.step(reads[seen], config.train.grad_shards, scale, result.loss, &load);
                seen = reads.len();
                recorder.section(&format!("step {step}: optimizer"));
            }
            At::End => recorder.section("state read back"),
        }
        Ok(())
    };
    let state = on_rank(&*backend, config, text, steps, at)?;
    let program = concat!("dropless ", env!("CARGO_PKG_VERSION"));
    let recording = recorder.finish(program, &title(config, steps), &backend.caps().device, Some(state))?;
    let bytes = recording.write(out)?;
    Ok((recording, bytes))
}

/// What is recorded, in a line.
fn title(config: &Config, steps: u64) -> String {
    let value = serde_json::to_value(config).unwrap_or_else(|e| unreachable!("plain data: {e}"));
    let word = |section: &str, key: &str| value[section][key].as_str().unwrap_or_default().to_owned();
    let (family, recipe, numerics) = (word("model", "family"), word("train", "recipe"), word("train", "numerics"));
    let tokens = count(config.train.tokens(), "token");
    format!("{} of {family}, {tokens} each, recipe {recipe}, numerics {numerics}", count(steps, "training step"))
}

/// A step reads its results back in another order than recordings expect.
fn misread(step: u64) -> Error {
    let why = "the results of the step were not read back in the order that recordings expect".into();
    Error::Step { step, source: CoreError::Unavailable { backend: "wgpu", why } }
}
