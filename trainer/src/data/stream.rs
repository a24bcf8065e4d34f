//! The order in which a run sees its text. NUMERICS.md, "Random numbers".
//!
//! Each epoch of a source cuts its token stream into windows at a random phase and permutes them, with numbers that
//! depend on the seed and the epoch alone. Sequences come from the sources by the quota method of Balinski and Young,
//! which keeps each within one sequence of its share at every step. So a position (for each source: epoch, index,
//! sequences taken) is all that a checkpoint has to keep, and the order depends neither on the batch size nor on the
//! ranks.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::permutation::{Permutation, below};
use super::{Batch, Corpus};
use crate::error::{Error, Result};
use dropless_model::init;

/// The training text: sources with shares.
#[derive(Clone, Debug)]
pub struct Mixture {
    sources: Vec<Corpus>,
    /// Parts of 2^32, rounded.
    shares: Vec<u64>,
}

/// The place of the next sequence: one in each source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// In the order of the sources; none is the beginning of all of them.
    pub sources: Vec<Place>,
}

/// The place of the next sequence of a source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// How often the whole text was seen.
    pub epoch: u64,
    /// Sequences of this epoch that were seen.
    pub index: usize,
    /// Sequences that were seen in all.
    pub taken: u64,
}

impl Mixture {
    /// Sources with weights, all of them positive.
    pub fn new(sources: Vec<(Corpus, f64)>) -> Mixture {
        let total: f64 = sources.iter().map(|(_, weight)| weight).sum();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of 2^32, at least 1")]
        let share = |weight: f64| (weight / total * 4_294_967_296.0).round().max(1.0) as u64;
        let shares = sources.iter().map(|&(_, weight)| share(weight)).collect();
        Mixture { sources: sources.into_iter().map(|(corpus, _)| corpus).collect(), shares }
    }

    /// The sources.
    pub fn sources(&self) -> &[Corpus] {
        &self.sources
    }

    /// Adds what the order of the tokens depends on, but for the seed.
    pub(super) fn hash(&self, hasher: &mut blake3::Hasher) {
        for (source, share) in self.sources.iter().zip(&self.shares) {
            hasher.update(&share.to_le_bytes());
            source.hash(hasher);
        }
    }

    /// The source of the next sequence: of those that are behind their share of the sequences with it, the first that has
    /// the largest share for each of its own.
    fn next(&self, walks: &[Walk]) -> usize {
        let total: u64 = self.shares.iter().sum();
        let sequences: u64 = walks.iter().map(|walk| walk.place.taken).sum::<u64>() + 1;
        let product = |a: u64, b: u64| u128::from(a) * u128::from(b);
        let (share, taken) = (|source: usize| self.shares[source], |source: usize| walks[source].place.taken);
        let behind = |source: &usize| product(share(*source), sequences) > product(taken(*source), total);
        let more = |a: usize, b: usize| product(share(a), taken(b) + 1) >= product(share(b), taken(a) + 1);
        (0..walks.len()).filter(behind).reduce(|a, b| if more(a, b) { a } else { b }).unwrap_or(0)
    }
}

impl From<Corpus> for Mixture {
    fn from(corpus: Corpus) -> Mixture {
        Mixture::new(vec![(corpus, 1.0)])
    }
}

/// An endless, shuffled walk over the training text.
#[derive(Clone, Debug)]
pub struct Stream {
    text: Arc<Mixture>,
    sequence: usize,
    seed: u64,
    walks: Vec<Walk>,
}

/// A walk over a source.
#[derive(Clone, Debug)]
struct Walk {
    place: Place,
    epoch: Epoch,
}

/// The windows of an epoch.
#[derive(Clone, Debug)]
struct Epoch {
    /// First token of the first window.
    phase: usize,
    order: Permutation,
}

impl Epoch {
    fn new(corpus: &Corpus, sequence: usize, seed: u64, source: usize, epoch: u64) -> Epoch {
        let name = match source {
            0 => format!("epoch {epoch}"),
            _ => format!("epoch {epoch} of source {source}"),
        };
        let key = init::key(seed, &name);
        let phase = below(key, 0, sequence.min(corpus.len() - sequence));
        let windows = (corpus.len() - sequence - phase).div_ceil(sequence);
        Epoch { phase, order: Permutation::new(key, windows) }
    }
}

impl Stream {
    /// A walk that goes on at `position`.
    ///
    /// # Errors
    /// [`Error::Data`] when a source is shorter than one sequence and the token after it, or the position lies outside.
    pub fn new(text: Arc<Mixture>, sequence: usize, seed: u64, position: Position) -> Result<Stream> {
        let count = text.sources.len();
        let places = if position.sources.is_empty() { vec![Place::default(); count] } else { position.sources };
        if places.len() != count {
            return Err(Error::Data(format!("the position is one in {} sources, but there are {count}", places.len())));
        }
        let mut walks = Vec::with_capacity(count);
        for (source, (corpus, place)) in text.sources.iter().zip(places).enumerate() {
            let what = if count == 1 { "training".into() } else { format!("training source {source}'s") };
            corpus.has_a_sequence(&what, sequence)?;
            let epoch = Epoch::new(corpus, sequence, seed, source, place.epoch);
            if place.index >= epoch.order.len() {
                return Err(Error::Data(format!(
                    "the position is sequence {} of epoch {}, which has {}: the training text has changed",
                    place.index,
                    place.epoch,
                    epoch.order.len()
                )));
            }
            walks.push(Walk { place, epoch });
        }
        Ok(Stream { text, sequence, seed, walks })
    }

    /// Where the next batch starts.
    pub fn position(&self) -> Position {
        Position { sources: self.walks.iter().map(|walk| walk.place).collect() }
    }

    /// The next `sequences` sequences.
    ///
    /// # Errors
    /// As [`Batch::with_capacity`].
    pub fn next_batch(&mut self, sequences: usize) -> Result<Batch> {
        let mut batch = Batch::with_capacity(self.sequence, sequences)?;
        for _ in 0..sequences {
            let source = self.text.next(&self.walks);
            let (corpus, Walk { place, epoch }) = (&self.text.sources[source], &mut self.walks[source]);
            batch.push(corpus, epoch.phase + epoch.order.at(place.index) * self.sequence);
            place.index += 1;
            place.taken += 1;
            if place.index == epoch.order.len() {
                (place.epoch, place.index) = (place.epoch + 1, 0);
                *epoch = Epoch::new(corpus, self.sequence, self.seed, source, place.epoch);
            }
        }
        Ok(batch)
    }
}

/// Batches that cover a corpus once, in its own order. What the last ones lack is filled up with tokens that do not
/// count, so that every target of the corpus counts once. Each may fail as [`Batch::with_capacity`].
///
/// # Errors
/// [`Error::Data`] when the text has no token to predict.
pub fn validation(
    corpus: &Corpus,
    sequence: usize,
    sequences: usize,
) -> Result<impl ExactSizeIterator<Item = Result<Batch>>> {
    corpus.has_a_target("validation")?;
    // The last token is only a target.
    let windows = (corpus.len() - 1).div_ceil(sequence);
    Ok((0..windows.div_ceil(sequences)).map(move |b| {
        let mut batch = Batch::with_capacity(sequence, sequences)?;
        for window in b * sequences..(b + 1) * sequences {
            batch.push(corpus, window * sequence);
        }
        Ok(batch)
    }))
}
