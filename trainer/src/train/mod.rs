//! Training: [`run`] drives every rank through the steps of a configuration.
//!
//! `inputs` brings batches to the device, `step` computes gradients, which the optimizer turns into new weights, `state` exchanges tensors with checkpoints, `ranks` runs the ranks of this process, `in_memory` leaves no files behind,
//! `reference` computes another framework's model directory.

pub mod directory;
mod evaluate;
mod in_memory;
mod inputs;
mod need;
pub mod ranks;
pub mod reference;
pub mod state;
mod step;

use std::path::PathBuf;
use std::time::Instant;

use dropless_core::{Backend, Error as CoreError, Group, Tensor};
use dropless_model::nn::Tokens;
use dropless_model::optimizer::{self, Gradients};
use dropless_model::words::count;
use dropless_model::{Architecture, Model};

pub use evaluate::{Validation, evaluate, overall};
pub use in_memory::steps_in_memory;
pub use need::{Need, RankNeed, of_rank};
pub use step::StepResult;

use crate::checkpoint::{self, Checkpoint, Save, State};
use crate::collective::{agree, away, broadcast, gather_number, same};
use crate::config::{Config, DataConfig};
use crate::data::{Kept, Position, Stream, Texts};
use crate::error::{Error, Result};
use crate::metrics::{Load, Metrics, Record, Speed};
use crate::options::TrainOptions;
use crate::output;
use crate::progress::Progress;
use crate::schedule;
use directory::Directory;
use evaluate::Mean;

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
/// A directory that another process holds, or that is not one for such a run; a configuration or text that does not fit, a checkpoint that cannot be read or written, [`Error::NonFinite`], and
/// failures of the ranks. The checkpoints written before stay.
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
    let claim = || Directory::claim(&options.out, options.resume);
    let directory = away(&ranks.iter().map(|rank| &**rank).collect::<Vec<_>>(), claim)?;
    on_ranks(ranks, config, options).inspect_err(|_| directory.give_up())
}

/// Trains on ranks that are open.
fn on_ranks(ranks: Vec<Box<dyn Backend>>, config: &Config, options: &TrainOptions) -> Result<Option<Summary>> {
    let all: Vec<&dyn Backend> = ranks.iter().map(|rank| &**rank).collect();
    let need = Need::of(&ranks, config, options)?;
    need.check()?;
    let run = away(&all, || Run::load(config, options, need))?;
    let end = ranks::run(ranks, |backend| Rank::new(&run, backend)?.train())?;
    Ok(end.map(|End { steps, loss, without_targets, validation, saved }| {
        let checkpoint::Saved { path: checkpoint, digest } = saved.expect("the first rank saves last");
        let validation = evaluate::described(&run.texts, validation);
        Summary { steps, loss, without_targets, validation, digest, checkpoint }
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
struct Rank<'a> {
    run: &'a Run<'a>,
    backend: &'a dyn Backend,
    tokens: Tokens,
    model: Model,
    stream: Stream,
    done: u64,
    report: Option<Report>,
    /// The last checkpoint, on the first rank.
    saved: Option<checkpoint::Saved>,
    /// Its step, on every rank.
    saved_step: Option<u64>,
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
}

impl<'a> Rank<'a> {
    fn new(run: &'a Run<'a>, backend: &'a dyn Backend) -> Result<Rank<'a>> {
        let (config, train) = (run.config, &run.config.train);
        same(backend, "configuration", config.to_toml().as_bytes())?;
        same(backend, "text", run.texts.record.hash().as_bytes())?;
        let from = run.resume(backend)?;
        let tokens = inputs::tokens(backend, config)?;
        let parts = config.model.architecture();
        let mut model = Model::new(backend, &parts, &config.options(), &tokens)?;
        let (mut position, mut done) = (Position::default(), 0);
        let (mut saved, mut saved_step) = (None, None);
        away(&[backend], || match &from {
            None => state::begin(backend, &mut model, config),
            Some(from) => state::load(backend, &mut model, &from.mapped()?, Some(&from.optimizer)),
        })?;
        if let Some(Checkpoint { path, state, digest, .. }) = from {
            (position, done) = (state.position, state.step);
            saved_step = Some(done);
            saved = Some(checkpoint::Saved { path, digest });
        }
        let stream = Stream::new(run.texts.train.clone(), train.sequence_length, train.seed, position)?;
        let idle = saved_step.is_some() && done >= train.steps;
        if idle && backend.caps().rank == 0 {
            output::say(format_args!(
                "nothing to do: the run has {}, and train.steps is {}",
                count(done, "step"),
                train.steps
            ));
        }
        let report = if backend.caps().rank == 0 && !idle {
            let out = &run.options.out;
            let metrics = match saved_step {
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
        Ok(Rank { run, backend, tokens, model, stream, done, report, saved, saved_step })
    }

    fn train(mut self) -> Result<End> {
        let train = &self.run.config.train;
        let (mut loss, mut without_targets) = (None, 0);
        if self.saved_step.is_none() && train.steps == 0 {
            self.save()?;
        }
        while self.done < train.steps {
            let mut record = self.step().map_err(Error::in_step(self.done + 1))?;
            loss = record.loss;
            without_targets += u64::from(record.loss.is_none());
            let last = self.done == train.steps;
            let due = |interval: u64| interval > 0 && self.done.is_multiple_of(interval);
            if due(train.eval_interval) && !last {
                let losses = self.validate(train.eval_batches).map_err(Error::in_step(self.done))?;
                record.validation = evaluate::described(&self.run.texts, losses);
            }
            if let Some(report) = &mut self.report {
                report.metrics.write(&record)?;
                report.progress.step(&record);
                for set in &record.validation {
                    let of =
                        if set.name == DataConfig::VALIDATION { String::new() } else { format!(" of {}", set.name) };
                    report.progress.note(&format!("step {}: validation loss{of} {:.4}", record.step, set.loss));
                }
            }
            if due(train.checkpoint_interval) || last {
                self.save().map_err(Error::in_step(self.done))?;
                if let (Some(report), Some(saved)) = (&mut self.report, &self.saved) {
                    report.metrics.add_digest(&saved.digest)?;
                }
            }
        }
        let validation = self.validate(0).map_err(Error::in_step(self.done))?;
        if let Some(report) = &self.report {
            report.progress.finish();
        }
        Ok(End { steps: self.done, loss, without_targets, validation, saved: self.saved })
    }

    /// One optimizer step.
    fn step(&mut self) -> Result<Record> {
        // What validation and saving took is no part of a step.
        self.backend.timings()?;
        let started = Instant::now();
        let (config, train) = (self.run.config, &self.run.config.train);
        let step = self.done + 1;
        let batch = self.stream.next_batch(train.batch_size)?;
        let (result, gradients, counts) = step::gradients(self.backend, config, &self.tokens, &self.model, &batch)?;
        if !result.loss.is_finite() || !result.grad_norm.is_finite() {
            return Err(self.non_finite(step, &result, &gradients)?);
        }
        let numbers = schedule::step_numbers(train, step);
        optimizer::update(self.backend, &mut self.model, &train.adamw(), &gradients, &counts, numbers)?;
        self.backend.wait()?;
        self.done = step;
        let step_s = started.elapsed().as_secs_f64();
        let caps = self.backend.caps();
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
                timings: self.backend.timings()?,
            },
            expert_load: Load::of(result.counts.iter().flatten()),
            validation: Vec::new(),
        })
    }

    /// The error for a loss or a gradient norm that is not finite. Names the first weight that is not, of whatever rank, or
    /// else the first gradient; only the rank that has it reports more than a consequence.
    fn non_finite(&self, step: u64, result: &StepResult, gradients: &Gradients) -> Result<Error> {
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

    /// The mean loss over that many batches of each validation set, or over all of it for 0.
    fn validate(&self, batches: usize) -> Result<Vec<Mean>> {
        let (config, texts) = (self.run.config, &self.run.texts);
        let losses = evaluate::mean_losses(self.backend, config, &self.tokens, &self.model, texts, batches)?;
        match losses.iter().all(|mean| mean.loss.is_finite()) {
            true => Ok(losses),
            false => Err(self.not_finite(self.done, "the validation loss".into())),
        }
    }

    /// The error for a tensor or number that is not finite.
    fn not_finite(&self, step: u64, tensor: String) -> Error {
        let out = &self.run.options.out;
        let checkpoint = self.saved_step.map_or("none".into(), |s| checkpoint::directory(out, s).display().to_string());
        Error::NonFinite { step, tensor, checkpoint }
    }

    fn save(&mut self) -> Result<()> {
        let run = self.run;
        let (weights, optimizer) = away(&[self.backend], || {
            let (weights, optimizer) = state::tensors(self.backend, &self.model)?;
            // A step may end with a finite loss and weights that overflowed; such a checkpoint must not displace a good one.
            match weights.iter().chain(&optimizer).find(|tensor| !tensor.is_finite()) {
                Some(bad) => Err(self.not_finite(self.done, bad.name.clone())),
                None => Ok((weights, optimizer)),
            }
        })?;
        let (position, text) = (self.stream.position(), run.texts.record.clone());
        let state = State { step: self.done, position, text, config: run.config.clone() };
        let save = Save {
            out: &run.options.out,
            weights: &weights,
            optimizer: &optimizer,
            state: &state,
            keep: run.config.train.keep_checkpoints,
        };
        self.saved = checkpoint::save(self.backend, &save)?;
        self.saved_step = Some(self.done);
        Ok(())
    }
}

/// Parameters in the matrix products of a token: the embedding is a look-up.
fn active(parts: &Architecture, model: &Model, expert_ranks: usize) -> usize {
    let (top_k, experts) = parts.moe().map_or((0, 0), |moe| (moe.top_k, moe.experts));
    let table = if parts.tied { 0 } else { parts.vocab * parts.hidden };
    model.params.active(top_k, experts, expert_ranks) - table
}
