//! Saving beside the training: the state is copied to the host while the device goes on, and a thread of each rank writes
//! its part from there. When the ranks have heard from each other, with the sums of a step, that all parts are written, a
//! thread of the first rank completes the checkpoint. One is on its way at a time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use dropless_core::backend::{Event, Queue};
use dropless_core::{Backend, Error as CoreError};
use dropless_model::Model;
use dropless_model::hf::tensors::Head;

use super::notice::{Notice, Part};
use super::staging::Staging;
use crate::checkpoint::{self, Contents, Plan, Saved, State, Stem};
use crate::collective::{away, gather_number};
use crate::error::{Error, Result};

const WORK: &str = "checkpoint";

/// A checkpoint that became complete.
#[derive(Clone, Debug)]
pub(crate) struct Completed {
    pub(crate) step: u64,
    pub(crate) saved: Saved,
    /// Of all its files.
    pub(crate) bytes: u64,
    /// From the beginning until the state was in the memory of the host.
    pub(crate) copy: Duration,
    /// From the beginning until it was safely on disk.
    pub(crate) write: Duration,
}

/// One rank's side of the saving.
#[derive(Debug)]
pub(super) struct Saver<'scope, 'env> {
    backend: &'env dyn Backend,
    scope: &'scope Scope<'scope, 'env>,
    staging: Arc<Staging<'env>>,
    /// The first rank's directory and process.
    out: PathBuf,
    process: u32,
    keep: usize,
    abandoned: Arc<AtomicBool>,
    /// The end of the copies that the device may still be making.
    copying: Option<Event>,
    flight: Option<Flight<'scope>>,
    /// The last one that became complete and is not reported yet, on the first rank.
    news: Option<Completed>,
    /// The last complete one, on the first rank.
    last: Option<Saved>,
    /// The step of the last one that all ranks know to be complete.
    step: Option<u64>,
}

/// A checkpoint on its way.
#[derive(Debug)]
struct Flight<'scope> {
    plan: Plan,
    begun: Instant,
    copy: Duration,
    /// Whether all ranks know that all parts are written.
    parts: bool,
    stage: Stage<'scope>,
}

/// How far it is, as this rank knows.
#[derive(Debug)]
enum Stage<'scope> {
    /// This rank's part is being written.
    Writing(ScopedJoinHandle<'scope, Result<Duration>>),
    /// It is written.
    Written,
    /// All parts are written, and the first rank completes the checkpoint.
    Completing(Option<ScopedJoinHandle<'scope, Result<(Saved, u64, Duration)>>>),
    /// It is complete; only the first rank knows.
    Complete,
    /// It failed here.
    Failed(Error),
}

/// Waits for a thread.
fn join<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl<'scope, 'env> Saver<'scope, 'env> {
    /// For the run in the first rank's `out`. Every rank calls it.
    ///
    /// # Errors
    /// A directory whose name is not UTF-8, memory that is not there, and failures of the ranks.
    pub(super) fn new(
        backend: &'env dyn Backend,
        scope: &'scope Scope<'scope, 'env>,
        model: &Model,
        out: &Path,
        keep: usize,
    ) -> Result<Self> {
        let (out, process) = checkpoint::origin(backend, out)?;
        let staging = Arc::new(Staging::new(backend, model)?);
        Ok(Saver {
            backend,
            scope,
            staging,
            out,
            process,
            keep,
            abandoned: Arc::default(),
            copying: None,
            flight: None,
            news: None,
            last: None,
            step: None,
        })
    }

    /// The run goes on from this checkpoint; only the first rank has to know more than its step.
    pub(super) fn resumed(&mut self, step: u64, saved: Saved) {
        (self.step, self.last) = (Some(step), Some(saved));
    }

    /// The step of the last checkpoint that all ranks know to be complete.
    pub(super) fn step(&self) -> Option<u64> {
        self.step
    }

    /// The last complete checkpoint, on the first rank.
    pub(super) fn last(&self) -> Option<&Saved> {
        self.last.as_ref()
    }

    /// The checkpoint that became complete since the last call, on the first rank.
    pub(super) fn news(&mut self) -> Option<Completed> {
        self.news.take()
    }

    fn first(&self) -> bool {
        self.backend.caps().rank == 0
    }

    /// Where `step` of the run is saved, for messages.
    pub(super) fn place(&self) -> String {
        self.step.map_or("none".into(), |step| checkpoint::directory(&self.out, step).display().to_string())
    }

    /// Begins a checkpoint of the model as the queued work leaves it, after the one before is complete. Every rank calls
    /// it.
    ///
    /// # Errors
    /// What kept the one before from becoming complete, and those of the backend.
    pub(super) fn begin(&mut self, model: &Model, state: State) -> Result<()> {
        self.settle()?;
        let begun = Instant::now();
        self.copying = Some(self.staging.copy(model)?);
        let caps = self.backend.caps();
        let (out, process, keep) = (self.out.clone(), self.process, self.keep);
        let plan = Plan { out, process, state, keep, rank: caps.rank, ranks: caps.ranks };
        let part = StagedPart {
            staging: self.staging.clone(),
            abandoned: self.abandoned.clone(),
            step: plan.state.step,
            place: self.place(),
        };
        let written = plan.clone();
        let write = move || {
            part.staging.landed()?;
            let copied = begun.elapsed();
            written.write_part(&part)?;
            Ok(copied)
        };
        let stage = Stage::Writing(self.spawn(write)?);
        self.flight = Some(Flight { plan, begun, copy: Duration::ZERO, parts: false, stage });
        Ok(())
    }

    fn spawn<T: Send + 'scope>(&self, work: impl FnOnce() -> T + Send + 'scope) -> Result<ScopedJoinHandle<'scope, T>> {
        Builder::new().name(WORK.into()).spawn_scoped(self.scope, work).map_err(Error::thread("writing a checkpoint"))
    }

    /// The model may change only after the copies: later work of the device waits for them.
    ///
    /// # Errors
    /// Those of the backend.
    pub(super) fn before_update(&mut self) -> Result<()> {
        match self.copying.take() {
            Some(copied) => Ok(self.backend.wait_for(Queue::Compute, &copied)?),
            None => Ok(()),
        }
    }

    /// How far this rank is, to tell the others.
    pub(super) fn part(&mut self) -> Part {
        self.look();
        match self.flight.as_ref().map(|flight| &flight.stage) {
            Some(Stage::Written) => Part::Written,
            Some(Stage::Failed(_)) => Part::Failed,
            Some(Stage::Writing(_) | Stage::Completing(_) | Stage::Complete) | None => Part::Open,
        }
    }

    /// Takes in what the threads have done, without waiting for them.
    fn look(&mut self) {
        let done = match self.flight.as_ref().map(|flight| &flight.stage) {
            Some(Stage::Writing(thread)) => thread.is_finished(),
            Some(Stage::Completing(Some(thread))) => thread.is_finished(),
            _ => false,
        };
        if done {
            self.wait();
        }
    }

    /// Waits for this rank's thread, if there is one.
    fn wait(&mut self) {
        let Some(mut flight) = self.flight.take() else { return };
        flight.stage = match flight.stage {
            Stage::Writing(thread) => match join(thread) {
                Ok(copy) => {
                    flight.copy = copy;
                    Stage::Written
                }
                Err(error) => Stage::Failed(error),
            },
            Stage::Completing(Some(thread)) => match join(thread) {
                Ok((saved, bytes, write)) => {
                    self.last = Some(saved.clone());
                    let step = flight.plan.state.step;
                    self.news = Some(Completed { step, saved, bytes, copy: flight.copy, write });
                    Stage::Complete
                }
                Err(error) => Stage::Failed(error),
            },
            stage => stage,
        };
        self.flight = Some(flight);
    }

    /// The first rank's thread for the rest, when all parts are written.
    fn complete(&mut self) -> Result<()> {
        let Some(mut flight) = self.flight.take() else { return Ok(()) };
        let (plan, begun) = (flight.plan.clone(), flight.begun);
        let work = move || plan.finish().map(|(saved, bytes)| (saved, bytes, begun.elapsed()));
        let thread = if self.first() { Some(self.spawn(work)?) } else { None };
        flight.stage = Stage::Completing(thread);
        flight.parts = true;
        self.flight = Some(flight);
        Ok(())
    }

    /// Takes in what all ranks told each other.
    ///
    /// # Errors
    /// On every rank when one failed: its own error, or that the other failed.
    pub(super) fn heard(&mut self, notices: &[Notice]) -> Result<()> {
        if notices.iter().any(|notice| notice.part == Part::Failed) {
            self.abandoned.store(true, Ordering::Relaxed);
            return self.agree();
        }
        if self.flight.is_some() && notices.iter().all(|notice| notice.part == Part::Written) {
            self.complete()?;
        }
        Ok(())
    }

    /// The error of a checkpoint that will not be complete because of rank `failed`. What there is of it goes.
    fn give_up(&mut self, failed: usize) -> Error {
        let rank = self.backend.caps().rank;
        let elsewhere = || CoreError::Collective { rank, op: WORK, what: format!("rank {failed} failed") }.into();
        let Some(flight) = self.flight.take() else { return elsewhere() };
        if rank == 0 {
            flight.plan.discard();
        }
        match flight.stage {
            Stage::Failed(error) if failed == rank => error,
            _ => elsewhere(),
        }
    }

    /// Waits until the checkpoint on its way is complete, on every rank.
    ///
    /// # Errors
    /// As [`heard`](Saver::heard).
    pub(super) fn settle(&mut self) -> Result<()> {
        let Some(flight) = &self.flight else { return Ok(()) };
        let (step, parts) = (flight.plan.state.step, flight.parts);
        if !parts {
            self.agree()?;
            self.complete()?;
        }
        self.agree()?;
        self.flight = None;
        self.step = Some(step);
        Ok(())
    }

    /// Waits for this rank's thread, and hears from all ranks whether theirs have failed.
    fn agree(&mut self) -> Result<()> {
        away(&[self.backend], || {
            self.wait();
            Ok(())
        })?;
        let failed = matches!(self.flight.as_ref().map(|flight| &flight.stage), Some(Stage::Failed(_)));
        let all = gather_number(self.backend, u32::from(failed))?;
        all.iter().position(|&failed| failed != 0).map_or(Ok(()), |rank| Err(self.give_up(rank)))
    }
}

impl Drop for Saver<'_, '_> {
    /// Whoever still writes need not go on.
    fn drop(&mut self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
}

/// The copy of this rank's part, as the thread that writes it sees it.
struct StagedPart<'a> {
    staging: Arc<Staging<'a>>,
    abandoned: Arc<AtomicBool>,
    /// For messages: the step, and where the checkpoint before it lies.
    step: u64,
    place: String,
}

impl Contents for StagedPart<'_> {
    fn heads(&self, stem: Stem) -> Vec<Head> {
        self.staging.heads(stem)
    }

    fn bytes(&self, stem: Stem, at: usize, out: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.staging.values(stem, at, |name, values| {
            if self.abandoned.load(Ordering::Relaxed) {
                return Err(Error::Usage(format!("the checkpoint of step {} is given up", self.step)));
            }
            // A step may end with a finite loss and weights that overflowed; such a checkpoint must not displace a good one.
            if !values.iter().all(|x| x.is_finite()) {
                let (tensor, checkpoint) = (name.to_owned(), self.place.clone());
                return Err(Error::NonFinite { step: self.step, tensor, checkpoint });
            }
            out(bytemuck::cast_slice(values))
        })
    }
}
