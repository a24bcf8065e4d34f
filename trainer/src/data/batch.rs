//! What a step trains on: windows of the token stream with targets, positions and visible keys.

use dropless_core::Error as CoreError;
use dropless_core::ops::NONE;

use super::Corpus;
use crate::error::Result;
use crate::system;

/// Sequences of equal length, one after the other; each field has one entry for each token.
///
/// The target of an end token is [`NONE`]: nothing predicts the first token of the next document. Positions count from
/// the start of the document or of the sequence, whichever is later.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Tokens per sequence.
    pub sequence: usize,
    /// Token ids.
    pub ids: Vec<u32>,
    /// Next tokens, or [`NONE`].
    pub targets: Vec<u32>,
    /// Position of each token for the rotary embedding.
    pub positions: Vec<u32>,
    /// First key within the sequence that each token attends to.
    pub start: Vec<u32>,
    /// Number of targets that count.
    pub valid: usize,
}

/// One rank's part of one micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Share<'a> {
    /// Token ids.
    pub ids: &'a [u32],
    /// Next tokens, or [`NONE`].
    pub targets: &'a [u32],
    /// Positions.
    pub positions: &'a [u32],
    /// First visible keys.
    pub start: &'a [u32],
}

impl Batch {
    /// An empty batch of sequences of this length.
    pub fn new(sequence: usize) -> Batch {
        Batch { sequence, ..Batch::default() }
    }

    /// The same with room for this many sequences.
    ///
    /// # Errors
    /// [`CoreError::Capacity`] when they need more memory than the machine has or the system gives.
    pub fn with_capacity(sequence: usize, sequences: usize) -> Result<Batch> {
        let mut batch = Batch::new(sequence);
        let fields = [&mut batch.ids, &mut batch.targets, &mut batch.positions, &mut batch.start];
        let tokens = sequence.saturating_mul(sequences);
        let needed = (tokens as u64).saturating_mul((fields.len() * size_of::<u32>()) as u64);
        let refused = |available| {
            let hint = format!("{sequences} sequences of {sequence} tokens; a smaller train.batch_size");
            CoreError::Capacity { op: "batch", needed, available, hint }
        };
        // A system may promise more than it has, and end the process that asks for it.
        if let Some(installed) = system::installed().filter(|&installed| needed > installed) {
            return Err(refused(installed).into());
        }
        for field in fields {
            field.try_reserve_exact(tokens).map_err(|_| refused(0))?;
        }
        Ok(batch)
    }

    /// Adds the window of `corpus` that starts at token `from`. What it lacks is filled up with tokens without targets, each
    /// of which sees itself alone.
    pub(super) fn push(&mut self, corpus: &Corpus, from: usize) {
        let mut window = Vec::with_capacity(self.sequence + 1);
        corpus.read(from..from + self.sequence + 1, &mut window);
        let mut start = 0;
        for (at, &id) in (0u32..).zip(window.iter().take(self.sequence)) {
            let ends = id == corpus.end();
            let target = window.get(at as usize + 1).copied().filter(|_| !ends);
            self.ids.push(id);
            self.targets.push(target.unwrap_or(NONE));
            self.positions.push(at - start);
            self.start.push(start);
            self.valid += usize::from(target.is_some());
            if ends {
                start = at + 1;
            }
        }
        let missing = self.sequence.saturating_sub(window.len());
        let to = self.ids.len() + missing;
        self.ids.resize(to, 0);
        self.targets.resize(to, NONE);
        self.positions.resize(to, 0);
        self.start.extend((0u32..).take(self.sequence).skip(self.sequence - missing));
    }

    /// Keys that a token attends to, on average.
    pub fn keys_per_token(&self) -> f64 {
        let before: u64 = self.positions.iter().map(|&position| u64::from(position)).sum();
        before as f64 / self.ids.len().max(1) as f64 + 1.0
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.ids.len() / self.sequence
    }

    /// The contiguous part of rank `rank` of `ranks` in micro-batch `step`, of micro-batches of `micro` sequences in all.
    pub fn share(&self, micro: usize, step: usize, rank: usize, ranks: usize) -> Share<'_> {
        let own = micro / ranks * self.sequence;
        let from = step * micro * self.sequence + rank * own;
        let part = |all| -> &[u32] { &<[u32]>::as_ref(all)[from..from + own] };
        Share {
            ids: part(&self.ids),
            targets: part(&self.targets),
            positions: part(&self.positions),
            start: part(&self.start),
        }
    }
}
