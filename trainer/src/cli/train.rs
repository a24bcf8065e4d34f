//! `dropless train`: the configuration, the run's directory, and what is printed at the end.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use dropless_model::hf::ModelDir;
use dropless_model::words::count;

use super::Machine;
use super::runs::{self, Fresh};
use crate::checkpoint::Checkpoint;
use crate::config::{Config, DataConfig, Numerics};
use crate::error::{Error, Result};
use crate::generate::Generator;
use crate::options::TrainOptions;
use crate::output::{report, say, tell};
use crate::sample::Sampling;
use crate::source::Source;
use crate::stop::{self, Reason, Request};
use crate::system;
use crate::train::directory::{CONFIG, Recorded};
use crate::train::{self, Validation};

/// The start of the text that a finished run shows.
const SAMPLE_PROMPT: &str = "The ";

#[derive(Debug, Args)]
pub(super) struct TrainArgs {
    /// Configuration; omitted keys have the values of configs/default.toml
    config: Option<PathBuf>,
    #[command(flatten)]
    machine: Machine,
    /// Arithmetic of the matrix products [default: train.numerics]
    #[arg(long, value_enum)]
    numerics: Option<Numerics>,
    /// Optimizer steps [default: train.steps]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Directory of the run [default: a new out/run-N; with --resume the last one]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Resume the run in --out from its newest checkpoint
    #[arg(long)]
    resume: bool,
    /// Start from the model and the weights of this directory (config.json and safetensors files)
    #[arg(long, value_name = "MODEL_DIR")]
    init: Option<PathBuf>,
    /// Change a key of the configuration, e.g. train.seed=7
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Stop after this time as after a signal, e.g. 3h45m: end the step, save, exit with code 3
    #[arg(long, value_name = "DURATION", value_parser = stop::duration)]
    time_limit: Option<Duration>,
    /// Write a trace of one step of rank 0 for Perfetto or chrome://tracing (the third step from here, or the last if
    /// there are fewer), and print where its time went; that step is slower
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print the effective configuration and stop
    #[arg(long)]
    print_config: bool,
    /// Print the memory that the run needs, and stop; exit code 2 if it does not fit
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(args: TrainArgs) -> Result<ExitCode> {
    if args.resume && args.init.is_some() {
        let what = "--init begins a run and --resume continues one, which knows its origin: give one of them";
        return Err(Error::Usage(what.into()));
    }
    let resumed = if args.resume { Some(runs::existing(args.out.as_deref())?) } else { None };
    let (config, note) = effective(&args, resumed.as_deref())?;
    let mut options = args.machine.options(PathBuf::new(), args.resume)?;
    options.trace.clone_from(&args.trace);
    options.stop = args.time_limit.map_or_else(Request::default, Request::after);
    config.check(options.ranks, options.expert_ranks())?;
    config.check_initial()?;
    config.check_data()?;
    if args.print_config {
        report(config.to_toml());
        return Ok(ExitCode::SUCCESS);
    }
    let ranks = options.open_ranks(config.train.numerics.into())?;
    if args.dry_run {
        let need = train::Need::of(&ranks, &config, &options)?;
        report(format_args!("memory\n{need}"));
        return need.check().map(|()| ExitCode::SUCCESS);
    }
    let leads = train::ranks::lead(&ranks);
    listen(&options.stop, leads)?;
    if !leads {
        train::run_on(ranks, &config, &options)?;
        return Ok(code(options.stop.stopped()));
    }
    note.iter().for_each(tell);
    let fresh = if resumed.is_none() { Some(Fresh::new(args.out.as_deref())?) } else { None };
    options.out = resumed.or_else(|| fresh.as_ref().map(|fresh| fresh.path.clone())).unwrap_or_default();
    say(format_args!("run in {}", options.out.display()));
    let result = train::run_on(ranks, &config, &options);
    let result = result.inspect_err(|_| fresh.iter().for_each(Fresh::give_up));
    let Some(summary) = result? else { return Ok(code(options.stop.stopped())) };
    if let Some(loss) = summary.loss {
        say(format_args!("training loss {loss:.4} at step {}", summary.steps));
    }
    if summary.without_targets > 0 {
        say(format_args!("warning: {} had no targets, and so no loss", count(summary.without_targets, "step")));
    }
    print_validation(&summary.validation);
    say(format_args!("checkpoint {}", summary.checkpoint.display()));
    say(format_args!("digest {}", summary.digest));
    if let Some(peak) = system::peak() {
        say(format_args!("peak memory of the process {} MiB", peak >> 20));
    }
    if let Some(reason) = summary.stopped {
        let (done, all) = (summary.steps, config.train.steps);
        say(format_args!("stopped by {reason} after step {done} of {all}: --resume goes on"));
        return Ok(code(Some(reason)));
    }
    if let Some(reason) = summary.unvalidated {
        let path = summary.checkpoint.display();
        tell(format_args!(
            "{reason}: all steps are done and saved, the last validation is left out: dropless eval {path}"
        ));
        return Ok(ExitCode::SUCCESS);
    }
    match config.train.sample_tokens {
        0 => {}
        tokens => print_sample(&summary.checkpoint, tokens, &options)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The exit code of a run that ended well, or was stopped.
fn code(stopped: Option<Reason>) -> ExitCode {
    stopped.map_or(ExitCode::SUCCESS, |_| ExitCode::from(super::STOPPED))
}

/// From now on, a signal ends the run after its step.
fn listen(request: &Request, leads: bool) -> Result<()> {
    let said = move |reason| {
        if leads {
            tell(format_args!("{reason}: the run ends with this step and saves; once more ends it at once"));
        }
    };
    request.listen(said).map_err(Error::thread("signals"))
}

/// The configuration of the file (by default that of the run to resume), with the command line's changes; and what there is
/// to say of it.
fn effective(args: &TrainArgs, resumed: Option<&Path>) -> Result<(Config, Option<String>)> {
    let mut note = None;
    let mut config = match (&args.init, &args.config, resumed) {
        (Some(dir), file, _) => Config::of_model(&ModelDir::open(dir)?, file.as_deref(), &args.set)?,
        (None, None, Some(out)) => match Recorded::find(out)? {
            Recorded::File(own) => Config::load(Some(&own), &args.set)?,
            Recorded::Checkpoint(path, config) => {
                let file = out.join(CONFIG);
                note = Some(format!("{} was lost, and is made again from {}", file.display(), path.display()));
                config.with(&args.set)?
            }
        },
        (None, file, _) => Config::load(file.as_deref(), &args.set)?,
    };
    if let Some(numerics) = args.numerics {
        config.train.numerics = numerics;
    }
    if let Some(steps) = args.steps {
        config.train.steps = steps;
    }
    Ok((config, note))
}

/// The loss on each validation set beside what a model without context would lose.
pub(super) fn print_validation(sets: &[Validation]) {
    sets.iter().map(against_unigram).for_each(say);
}

fn against_unigram(Validation { name, loss, unigram, unit, .. }: &Validation) -> String {
    let of = if name == DataConfig::VALIDATION { String::new() } else { format!(" of {name}") };
    let side = if loss <= unigram { "under" } else { "above" };
    let by = (unigram - loss).abs();
    format!(
        "validation loss{of} {loss:.4} nats per {unit}, {by:.4} {side} the {unit}-unigram entropy of the text, {unigram:.4}"
    )
}

fn print_sample(checkpoint: &Path, tokens: usize, options: &TrainOptions) -> Result<()> {
    let generator = Generator::open(Source::of_checkpoint(&Checkpoint::open(checkpoint)?, &[])?, options)?;
    let sampling = Sampling { seed: 0, temperature: 0.8, top_p: 0.95 };
    let text = generator.continue_texts(&[SAMPLE_PROMPT], tokens, &sampling, |_, _| {})?.concat();
    say("sample:");
    format!("{SAMPLE_PROMPT}{text}").lines().for_each(say);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f29_a_loss_is_under_or_above_the_entropy_by_a_positive_number() {
        let line = |loss| {
            let name = DataConfig::VALIDATION.to_owned();
            against_unigram(&Validation { name, loss, targets: 9, unigram: 3.25, unit: "byte" })
        };
        let end = "the byte-unigram entropy of the text, 3.2500";
        assert_eq!(line(2.5), format!("validation loss 2.5000 nats per byte, 0.7500 under {end}"));
        assert_eq!(line(5.0941), format!("validation loss 5.0941 nats per byte, 1.8441 above {end}"));
    }
}
