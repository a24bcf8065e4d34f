//! The order in which a run sees its text. NUMERICS.md, "Random numbers".
//!
//! Each epoch cuts the token stream into windows at a random phase and shuffles them (Fisher and Yates), with numbers
//! that depend on the seed and the epoch alone. So a position (epoch, index) is all that a checkpoint has to keep, and
//! the order depends neither on the batch size nor on the ranks.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Batch, Corpus};
use crate::error::{Error, Result};
use dropless_model::init;

/// The place of the next sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// How often the whole text was seen.
    pub epoch: u64,
    /// Sequences of this epoch that were seen.
    pub index: usize,
}

/// An endless, shuffled walk over a corpus.
#[derive(Clone, Debug)]
pub struct Stream {
    corpus: Arc<Corpus>,
    sequence: usize,
    seed: u64,
    position: Position,
    /// First token of each window of the epoch, in order.
    windows: Vec<usize>,
}

impl Stream {
    /// A walk that goes on at `position`.
    ///
    /// # Errors
    /// [`Error::Data`] when the text is shorter than one sequence and the token after it, or the position lies outside.
    pub fn new(corpus: Arc<Corpus>, sequence: usize, seed: u64, position: Position) -> Result<Stream> {
        corpus.has_a_sequence("training", sequence)?;
        let windows = windows(&corpus, sequence, seed, position.epoch);
        if position.index >= windows.len() {
            return Err(Error::Data(format!(
                "the position is sequence {} of epoch {}, which has {}: the training text has changed",
                position.index,
                position.epoch,
                windows.len()
            )));
        }
        Ok(Stream { corpus, sequence, seed, position, windows })
    }

    /// Where the next batch starts.
    pub fn position(&self) -> Position {
        self.position
    }

    /// The next `sequences` sequences.
    ///
    /// # Errors
    /// As [`Batch::with_capacity`].
    pub fn next_batch(&mut self, sequences: usize) -> Result<Batch> {
        let mut batch = Batch::with_capacity(self.sequence, sequences)?;
        for _ in 0..sequences {
            batch.push(&self.corpus, self.windows[self.position.index]);
            self.position.index += 1;
            if self.position.index == self.windows.len() {
                self.position = Position { epoch: self.position.epoch + 1, index: 0 };
                self.windows = windows(&self.corpus, self.sequence, self.seed, self.position.epoch);
            }
        }
        Ok(batch)
    }
}

/// Batches that cover a corpus once, in its own order; the last one is filled up with sequences that do not count. Each
/// may fail as [`Batch::with_capacity`].
///
/// # Errors
/// [`Error::Data`] when the text is shorter than one sequence and the token after it.
pub fn validation(corpus: &Corpus, sequence: usize, sequences: usize) -> Result<impl Iterator<Item = Result<Batch>>> {
    corpus.has_a_sequence("validation", sequence)?;
    let windows: Vec<usize> = starts(corpus, sequence, 0).collect();
    let batches = windows.len().div_ceil(sequences);
    Ok((0..batches).map(move |b| {
        let mut batch = Batch::with_capacity(sequence, sequences)?;
        for i in b * sequences..(b + 1) * sequences {
            match windows.get(i) {
                Some(&from) => batch.push(corpus, from),
                None => batch.pad(),
            }
        }
        Ok(batch)
    }))
}

/// First tokens of the windows that fit when the first one starts at `phase`.
fn starts(corpus: &Corpus, sequence: usize, phase: usize) -> impl Iterator<Item = usize> {
    (phase..corpus.tokens.len() - sequence).step_by(sequence)
}

/// The windows of an epoch in their order.
fn windows(corpus: &Corpus, sequence: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let key = init::key(seed, &format!("epoch {epoch}"));
    let below = |index: u64, limit: usize| -> usize {
        let word = u64::from(init::block(key, index)[0]);
        usize::try_from((word * limit as u64) >> 32).unwrap_or(0)
    };
    let phases = sequence.min(corpus.tokens.len() - sequence);
    let mut windows: Vec<usize> = starts(corpus, sequence, below(0, phases)).collect();
    for last in (1..windows.len()).rev() {
        windows.swap(last, below(last as u64, last + 1));
    }
    windows
}
