//! Training: [`run`] drives every rank through the steps of a configuration.
//!
//! `inputs` brings batches to the device, `step` computes gradients, which the optimizer turns into new weights, `notice`
//! is what the ranks tell each other with it, `saver` writes checkpoints beside the steps from the copy in `staging`,
//! `state` exchanges tensors with checkpoints, `ranks` runs the ranks of this process, `in_memory` leaves no files behind, `recorded` writes down what the wgpu backend does,
//! `reference` computes another framework's model directory.

pub mod directory;
mod evaluate;
mod in_memory;
mod inputs;
mod need;
mod notice;
pub mod ranks;
#[cfg(feature = "wgpu")]
mod recorded;
pub mod reference;
mod saver;
mod staging;
pub mod state;
mod step;

use std::path::PathBuf;
use std::thread::Scope;
use std::time::Instant;

use dropless_core::trace::Traced;
use dropless_core::{Backend, Error as CoreError, Group, Tensor, files};
use dropless_model::nn::Tokens;
use dropless_model::optimizer::{self, Gradients};
use dropless_model::words::count;
use dropless_model::{Architecture, Model};

pub use evaluate::{Mean, Validation, evaluate, overall};
pub use in_memory::steps_in_memory;
pub use need::{Need, RankNeed, of_rank};
#[cfg(feature = "wgpu")]
pub use recorded::record;
pub use step::StepResult;

use crate::checkpoint::{self, Checkpoint, State};
use crate::collective::{agree, away, broadcast, gather_number, same};
use crate::config::{Config, DataConfig};
use crate::data::{Kept, Position, Stream, Texts};
use crate::error::{Error, Result};
use crate::metrics::{Load, Metrics, Record, Speed};
use crate::options::TrainOptions;
use crate::output;
use crate::progress::{Progress, Validating};
use crate::schedule;
use crate::stop::{Reason, Request};
use crate::trace::TracedStep;
use directory::Directory;
use evaluate::Beside;
use notice::Notice;
pub(crate) use saver::Completed;
use saver::Saver;

/// Which step of a run is traced, from where it begins or goes on: by then everything is compiled.
const TRACED: u64 = 3;

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Steps done.
    pub steps: u64,
    /// Loss of the last step, in nats per token; None when there was no step left to do, or nothing to predict in it.
    pub loss: Option<f32>,
    /// Steps in which there was nothing to predict.
    pub without_targets: u64,
    /// What the validation after the last step came to, for each set.
    pub validation: Vec<Validation>,
    /// Hash over all weights and optimizer state.
    pub digest: String,
    /// The last checkpoint.
    pub checkpoint: PathBuf,
    /// Why the run stopped before it was done; it can be resumed.
    pub stopped: Option<Reason>,
    /// Why there was no validation after the last step, or not all of it. The run is done.
    pub unvalidated: Option<Reason>,
}

/// What the ranks of this process share.
struct Run<'a> {
    config: &'a Config,
    options: &'a TrainOptions,
    need: Need,
    texts: Texts,
}

/// Trains as configured, from the beginning or from the newest checkpoint in `options.out`. The summary is there in the
/// process of the first rank.
///
/// # Errors
/// A directory that another process holds, or that is not one for such a run; a configuration or text that does not
/// fit, a checkpoint that cannot be read or written, [`Error::NonFinite`], and failures of the ranks. The checkpoints
/// written before stay.
pub fn run(config: &Config, options: &TrainOptions) -> Result<Option<Summary>> {
    config.check(options.ranks, options.expert_ranks())?;
    run_on(options.open_ranks(config.train.numerics.into())?, config, options)
}

/// The same with ranks that are open. Other processes drive the others: they have the same configuration, text and file
/// system, and nothing else has to be shared. `options.out` counts in the process of the first rank.
///
/// # Errors
/// As [`run`]; and when the processes have different configurations or texts.
pub fn run_on(ranks: Vec<Box<dyn Backend>>, config: &Config, options: &TrainOptions) -> Result<Option<Summary>> {
    let groups = ranks.first().map_or((0, 0), |rank| (rank.caps().ranks, rank.caps().expert_ranks));
    config.check(groups.0, groups.1)?;
    config.check_initial()?;
    config.check_data()?;
    if !ranks::lead(&ranks) {
        return on_ranks(ranks, config, options);
    }
    let claim = || {
        let directory = Directory::claim(&options.out, options.resume)?;
        // The trace may lie in it.
        match options.trace.as_deref().map_or(Ok(()), files::replaceable) {
            Ok(()) => Ok(directory),
            Err(error) => {
                directory.give_up();
                Err(error.into())
            }
        }
    };
    let directory = away(&ranks.iter().map(|rank| &**rank).collect::<Vec<_>>(), claim)?;
    on_ranks(ranks, config, options).inspect_err(|_| directory.give_up())
}

/// Trains on ranks that are open.
fn on_ranks(ranks: Vec<Box<dyn Backend>>, config: &Config, options: &TrainOptions) -> Result<Option<Summary>> {
    let all: Vec<&dyn Backend> = ranks.iter().map(|rank| &**rank).collect();
    let need = Need::of(&ranks, config, options)?;
    need.check()?;
    let run = away(&all, || Run::load(config, options, need))?;
    let end = ranks::run(ranks, |backend| std::thread::scope(|scope| Rank::new(&run, backend, scope)?.train()));
    options.stop.set_training(false);
    Ok(end?.map(|End { steps, loss, without_targets, validation, saved, stopped, unvalidated }| {
        let checkpoint::Saved { path: checkpoint, digest } = saved.expect("the first rank saves last");
        let validation = evaluate::described(&run.texts, validation);
        Summary { steps, loss, without_targets, validation, digest, checkpoint, stopped, unvalidated }
    }))
}

impl<'a> Run<'a> {
    fn load(config: &'a Config, options: &'a TrainOptions, need: Need) -> Result<Run<'a>> {
        Ok(Run { config, options, need, texts: Texts::load(config)? })
    }

    /// The checkpoint where the run goes on, if there is one: the first rank finds it, and all open it.
    fn resume(&self, backend: &dyn Backend) -> Result<Option<Checkpoint>> {
        let finds = self.options.resume && backend.caps().rank == 0;
        let found = agree(backend, "resume", || if finds { self.newest() } else { Ok(None) })?;
        let path = found.as_ref().map_or(Ok(""), |checkpoint| checkpoint::text(&checkpoint.path))?;
        let path = broadcast(backend, path)?;
        if path.is_empty() || finds {
            return Ok(found);
        }
        away(&[backend], || Checkpoint::reopen(path.as_ref()).map(Some))
    }

    /// The newest undamaged checkpoint, which must fit the configuration.
    fn newest(&self) -> Result<Option<Checkpoint>> {
        let out = &self.options.out;
        checkpoint::remove_incomplete(out)?.iter().for_each(output::tell);
        let found = checkpoint::newest(out)?;
        found.notes.iter().for_each(output::tell);
        let nothing = || Error::Usage(format!("--resume: {} has no checkpoint any more", out.display()));
        let checkpoint = found.checkpoint.ok_or_else(nothing)?;
        checkpoint.state.config.check_continues_as(self.config)?;
        checkpoint.state.text.check_continues_as(&self.texts.record)?;
        Ok(Some(checkpoint))
    }
}

/// One rank's view of a run.
struct Rank<'scope, 'a> {
    run: &'a Run<'a>,
    backend: &'a dyn Backend,
    tokens: Tokens,
    model: Model,
    stream: Stream,
    done: u64,
    report: Option<Report>,
    saver: Saver<'scope, 'a>,
    /// What the validation after the last step came to, where the checkpoint to go on from has it.
    validated: Option<Vec<Mean>>,
    /// The step to trace.
    traced: Option<u64>,
    /// Why all ranks stop after the present step.
    stopped: Option<Reason>,
}

/// What the first rank tells the world.
struct Report {
    metrics: Metrics,
    progress: Progress,
}

/// How a rank's run ended.
struct End {
    steps: u64,
    loss: Option<f32>,
    without_targets: u64,
    validation: Vec<Mean>,
    saved: Option<checkpoint::Saved>,
    stopped: Option<Reason>,
    unvalidated: Option<Reason>,
}

/// The checkpoint and the wish to stop, while something else goes on.
struct Watch<'w, 'scope, 'a> {
    saver: &'w mut Saver<'scope, 'a>,
    request: &'w Request,
    stopped: &'w mut Option<Reason>,
    shown: Option<Validating>,
}

impl Beside for Watch<'_, '_, '_> {
    fn notice(&mut self) -> Result<Notice> {
        Ok(Notice { stop: self.request.asked(), part: self.saver.part() })
    }

    fn goes_on(&mut self, notices: &[Notice]) -> Result<bool> {
        self.saver.heard(notices)?;
        *self.stopped = notice::stop(notices);
        Ok(self.stopped.is_none())
    }

    fn reached(&mut self, done: usize, of: usize) {
        self.shown.iter_mut().for_each(|shown| shown.reached(done, of));
    }
}

impl<'scope, 'a> Rank<'scope, 'a> {
    fn new(run: &'a Run<'a>, backend: &'a dyn Backend, scope: &'scope Scope<'scope, 'a>) -> Result<Rank<'scope, 'a>> {
        let (config, train) = (run.config, &run.config.train);
        same(backend, "configuration", config.to_toml().as_bytes())?;
        same(backend, "text", run.texts.record.hash().as_bytes())?;
        let from = run.resume(backend)?;
        let tokens = inputs::tokens(backend, config)?;
        let parts = config.model.architecture();
        let mut model = Model::new(backend, &parts, &config.options(), &tokens)?;
        let (mut position, mut done, mut validated) = (Position::default(), 0, None);
        let mut saver = Saver::new(backend, scope, &model, &run.options.out, train.keep_checkpoints)?;
        away(&[backend], || match &from {
            None => state::begin(backend, &mut model, config),
            Some(from) => state::load(backend, &mut model, &from.mapped()?, Some(&from.optimizer)),
        })?;
        let bytes = from.as_ref().map_or(0, Checkpoint::bytes);
        if let Some(Checkpoint { path, state, digest, .. }) = from {
            let of_set = |(name, _): &(String, _)| state.validation.get(name).copied();
            validated = run.texts.validation.iter().map(of_set).collect();
            (position, done) = (state.position, state.step);
            saver.resumed(done, checkpoint::Saved { path, digest });
        }
        let stream = Stream::new(run.texts.train.clone(), train.sequence_length, train.seed, position)?;
        if let Some(saved) = saver.last().filter(|_| backend.caps().rank == 0) {
            Metrics::complete(&run.options.out, done, &saved.digest, bytes)?;
        }
        let idle = saver.step().is_some() && done >= train.steps;
        if idle && backend.caps().rank == 0 {
            output::say(format_args!(
                "nothing to do: the run has {}, and train.steps is {}",
                count(done, "step"),
                train.steps
            ));
        }
        let report = if backend.caps().rank == 0 && !idle {
            let out = &run.options.out;
            let metrics = match saver.step() {
                None => Metrics::begin(out)?,
                Some(_) => {
                    let (metrics, note) = Metrics::resume(out, done)?;
                    note.iter().for_each(output::tell);
                    metrics
                }
            };
            directory::write_config(out, config)?;
            Kept::write(&run.texts.tokenizer, out)?;
            config.warnings().iter().for_each(output::tell);
            let progress = Progress::new(train.steps, done, train.log_interval);
            let caps = backend.caps();
            let (total, active) = (model.params.total(caps.expert_ranks), active(&parts, &model, caps.expert_ranks));
            let shared = match caps.size(Group::Replicas) {
                1 => String::new(),
                replicas => format!(" ({} share the experts, {replicas} times)", caps.expert_ranks),
            };
            progress.note(&format!(
                "{} on {}{shared}: {}, {:?}",
                caps.backend,
                count(caps.ranks, "rank"),
                caps.device,
                caps.numerics
            ));
            progress.note(&format!("{total} parameters, {active} of them active for a token"));
            format!("memory\n{}", run.need).lines().for_each(|line| progress.note(line));
            Some(Report { metrics, progress })
        } else {
            None
        };
        let traced = run.options.trace.as_ref().filter(|_| backend.caps().rank == 0);
        let traced = traced.map(|_| train.steps.min(done + TRACED));
        Ok(Rank { run, backend, tokens, model, stream, done, report, saver, validated, traced, stopped: None })
    }

    fn train(mut self) -> Result<End> {
        let train = &self.run.config.train;
        let (mut loss, mut without_targets, mut validation) = (None, 0, None);
        self.run.options.stop.set_training(true);
        if self.saver.step().is_none() && train.steps == 0 {
            self.save(None, &[])?;
        }
        while self.done < train.steps && self.stopped.is_none() {
            let mut record = self.step().map_err(Error::in_step(self.done + 1))?;
            loss = record.loss;
            without_targets += u64::from(record.loss.is_none());
            let last = self.done == train.steps;
            let done = self.done;
            let due = |interval: u64| interval > 0 && done.is_multiple_of(interval);
            if self.stopped.is_none() && (due(train.eval_interval) || last) {
                let batches = if last { 0 } else { train.eval_batches };
                let losses = self.validate(batches).map_err(Error::in_step(self.done))?;
                record.validation = losses.clone().map_or_else(Vec::new, |l| evaluate::described(&self.run.texts, l));
                if last {
                    validation = losses;
                }
            }
            if let Some(report) = &mut self.report {
                report.write(&record, last)?;
            }
            if due(train.checkpoint_interval) || last || self.stopped.is_some() {
                let validated = (!record.validation.is_empty()).then(|| overall(&record.validation));
                self.save(validated, validation.as_deref().unwrap_or_default()).map_err(Error::in_step(self.done))?;
            }
            self.tell_saved()?;
        }
        self.saver.settle().map_err(Error::in_step(self.done))?;
        self.tell_saved()?;
        // A run that was resumed where it ends.
        if validation.is_none() && self.stopped.is_none() {
            validation = match self.validated.take() {
                None => self.validate(0).map_err(Error::in_step(self.done))?,
                validated => validated,
            };
        }
        // After the last step nothing is left to go on with.
        let (stopped, unvalidated) = match self.done < train.steps {
            true => (self.stopped, None),
            false => (None, self.stopped),
        };
        if let Some(reason) = stopped {
            self.run.options.stop.stop(reason);
        }
        if let Some(report) = &self.report {
            report.progress.finish();
        }
        if let (Some(_), Some(file)) = (self.traced, &self.run.options.trace) {
            output::tell(format_args!("warning: no trace in {}: the run ended before the step of it", file.display()));
        }
        let (validation, saved) = (validation.unwrap_or_default(), self.saver.last().cloned());
        Ok(End { steps: self.done, loss, without_targets, validation, saved, stopped, unvalidated })
    }

    /// Reports a checkpoint that became complete.
    fn tell_saved(&mut self) -> Result<()> {
        match (&mut self.report, self.saver.news()) {
            (Some(report), Some(completed)) => report.saved(&completed),
            _ => Ok(()),
        }
    }

    /// One optimizer step.
    fn step(&mut self) -> Result<Record> {
        // What validation and saving took is no part of a step.
        self.backend.timings()?;
        let step = self.done + 1;
        if self.traced != Some(step) {
            return self.step_on(self.backend);
        }
        self.traced = None;
        let traced = Traced::begin(self.backend)?;
        let record = self.step_on(&traced)?;
        self.tell_traced(&TracedStep { step, caps: self.backend.caps(), trace: traced.end()? });
        Ok(record)
    }

    /// Writes a trace and shows its table. A run does not end for it.
    fn tell_traced(&self, traced: &TracedStep<'_>) {
        let (Some(report), Some(file)) = (&self.report, &self.run.options.trace) else { return };
        traced.table().iter().for_each(|line| report.progress.note(line));
        match traced.write(file) {
            Ok(()) => report.progress.note(&format!("trace {}", file.display())),
            Err(error) => output::tell(format_args!("warning: no trace: {error}")),
        }
    }

    /// One optimizer step, on the rank's backend or one around it.
    fn step_on(&mut self, backend: &dyn Backend) -> Result<Record> {
        let started = Instant::now();
        let (config, train) = (self.run.config, &self.run.config.train);
        let step = self.done + 1;
        let scope = backend.scope("batch", None);
        let batch = self.stream.next_batch(train.batch_size)?;
        drop(scope);
        let notice = self.watch().notice()?;
        let (result, gradients, counts) = step::gradients(backend, config, &self.tokens, &self.model, &batch, notice)?;
        self.watch().goes_on(&result.notices)?;
        if !result.loss.is_finite() || !result.grad_norm.is_finite() {
            return Err(self.non_finite(step, &result, &gradients)?);
        }
        let numbers = schedule::step_numbers(train, step);
        let _scope = backend.scope("update", None);
        self.saver.before_update()?;
        optimizer::update(backend, &mut self.model, &train.adamw(), &gradients, &counts, numbers)?;
        backend.wait()?;
        self.done = step;
        let step_s = started.elapsed().as_secs_f64();
        let caps = backend.caps();
        Ok(Record {
            step,
            loss: (batch.valid > 0).then_some(result.loss),
            targets: batch.valid,
            grad_norm: result.grad_norm,
            lr: numbers.learning_rate,
            speed: Speed {
                step_s,
                tokens: train.tokens(),
                flops_per_token: config.model.architecture().flops_per_token(batch.keys_per_token()),
                ranks: caps.ranks,
                peak_flops: caps.peak_flops,
                timings: backend.timings()?,
            },
            expert_load: Load::of(result.counts.iter().flatten()),
            validation: Vec::new(),
        })
    }

    /// The error for a loss or a gradient norm that is not finite. Names the first weight that is not, of whatever rank, or
    /// else the first gradient; only the rank that has it reports more than a consequence.
    fn non_finite(&mut self, step: u64, result: &StepResult, gradients: &Gradients) -> Result<Error> {
        // What led here is no fault of the checkpoint on its way.
        self.saver.settle()?;
        let mut tensors: Vec<(String, Tensor)> =
            self.model.params.pieces()?.into_iter().map(|piece| (piece.name, piece.value)).collect();
        let gradients = gradients.sums.by_name(&self.model.params)?;
        tensors.extend(gradients.into_iter().map(|(name, tensor)| (format!("the gradient of {name}"), tensor)));
        let mine = away(&[self.backend], || {
            for (at, (_, tensor)) in tensors.iter().enumerate() {
                if !self.backend.download::<f32>(tensor)?.iter().all(|x| x.is_finite()) {
                    return Ok(at);
                }
            }
            Ok(tensors.len())
        })?;
        let places = gather_number(self.backend, u32::try_from(mine).unwrap_or(u32::MAX))?;
        let first = (0..places.len()).min_by_key(|&rank| places[rank]).unwrap_or(0);
        let rank = self.backend.caps().rank;
        if rank != first {
            let what = format!("rank {first} has a number that is not finite");
            return Ok(CoreError::Collective { rank, op: "step", what }.into());
        }
        let elsewhere = if result.loss.is_finite() { "the gradient norm" } else { "the loss" };
        let name = tensors.into_iter().nth(mine).map_or(elsewhere.into(), |(name, _)| name);
        Ok(self.not_finite(step, name))
    }

    fn watch(&mut self) -> Watch<'_, 'scope, 'a> {
        let Rank { saver, stopped, run, .. } = self;
        Watch { saver, request: &run.options.stop, stopped, shown: None }
    }

    /// The mean loss over that many batches of each validation set, or over all of it for 0; None when the ranks are to
    /// stop.
    fn validate(&mut self, batches: usize) -> Result<Option<Vec<Mean>>> {
        let (run, backend) = (self.run, self.backend);
        let shown = (backend.caps().rank == 0)
            .then(|| self.report.as_ref().map_or_else(Validating::alone, |report| report.progress.validation()));
        let Rank { saver, stopped, tokens, model, .. } = self;
        let mut watch = Watch { saver, request: &run.options.stop, stopped, shown };
        let losses = evaluate::mean_losses(backend, run.config, tokens, model, &run.texts, batches, &mut watch)?;
        match losses.iter().flatten().all(|mean| mean.loss.is_finite()) {
            true => Ok(losses),
            false => {
                self.saver.settle()?;
                Err(self.not_finite(self.done, "the validation loss".into()))
            }
        }
    }

    /// The error for a tensor or number that is not finite.
    fn not_finite(&self, step: u64, tensor: String) -> Error {
        Error::NonFinite { step, tensor, checkpoint: self.saver.place() }
    }

    /// Begins a checkpoint; after the last step, with what the validation of the whole sets came to.
    fn save(&mut self, validation_loss: Option<f64>, whole: &[Mean]) -> Result<()> {
        let (position, text, config) = (self.stream.position(), self.run.texts.record.clone(), self.run.config.clone());
        let names = self.run.texts.validation.iter().map(|(name, _)| name.clone());
        let validation = names.zip(whole.iter().copied()).collect();
        let state = State { step: self.done, position, text, config, validation_loss, validation };
        self.saver.begin(&self.model, state)
    }
}

impl Report {
    /// A step; the last one's validation is told in the end.
    fn write(&mut self, record: &Record, last: bool) -> Result<()> {
        self.metrics.write(record)?;
        self.progress.step(record);
        for set in record.validation.iter().filter(|_| !last) {
            let of = if set.name == DataConfig::VALIDATION { String::new() } else { format!(" of {}", set.name) };
            self.progress.note(&format!("step {}: validation loss{of} {:.4}", record.step, set.loss));
        }
        Ok(())
    }

    fn saved(&mut self, completed: &Completed) -> Result<()> {
        let Completed { step, bytes, copy, write, .. } = completed;
        self.metrics.saved(completed)?;
        self.progress.note(&format!(
            "step {step}: checkpoint of {:.1} MB, copied in {:.2} s, on disk after {:.2} s",
            *bytes as f64 / 1e6,
            copy.as_secs_f64(),
            write.as_secs_f64()
        ));
        Ok(())
    }
}

/// Parameters in the matrix products of a token: the embedding is a look-up.
fn active(parts: &Architecture, model: &Model, expert_ranks: usize) -> usize {
    let (top_k, experts) = parts.moe().map_or((0, 0), |moe| (moe.top_k, moe.experts));
    let table = if parts.tied { 0 } else { parts.vocab * parts.hidden };
    model.params.active(top_k, experts, expert_ranks) - table
}
