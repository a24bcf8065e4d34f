//! How the tokens of one micro-step lie on a rank.

use crate::backend::Backend;
use crate::error::{Result, ensure};
use crate::tensor::{DType, Tensor};

/// The tokens of a micro-step on one rank: whole sequences, in contiguous, equal gradient shards.
///
/// NUMERICS.md, "Gradient shards and ranks": a weight gradient is one product chain for each shard, so a digest does not
/// depend on the number of ranks.
#[derive(Clone, Debug)]
pub struct Tokens {
    count: usize,
    capacity: usize,
    sequence: usize,
    shards: usize,
    whole: Tensor,
    by_shard: Tensor,
}

impl Tokens {
    /// `sequences` sequences of `sequence` tokens in `shards` shards.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when the shards do not divide the sequences.
    pub fn new(backend: &dyn Backend, sequences: usize, sequence: usize, shards: usize) -> Result<Tokens> {
        ensure(
            shards > 0 && sequences.is_multiple_of(shards),
            "tokens",
            "shards",
            || format!("a divisor of the {sequences} sequences"),
            || shards.to_string(),
        )?;
        let count = sequences * sequence;
        ensure(
            u32::try_from(count).is_ok_and(|n| n < u32::MAX),
            "tokens",
            "count",
            || format!("below {}", u32::MAX),
            || count.to_string(),
        )?;
        #[expect(clippy::cast_possible_truncation, reason = "count fits in u32")]
        let offsets = |groups: usize| -> Vec<u32> { (0..=groups).map(|g| (count / groups * g) as u32).collect() };
        Ok(Tokens {
            count,
            capacity: count,
            sequence,
            shards,
            whole: backend.upload(DType::U32, &[2], &offsets(1))?,
            by_shard: backend.upload(DType::U32, &[shards + 1], &offsets(shards))?,
        })
    }

    /// The same, when ranks hold different numbers of tokens: `capacity` is that of the fullest rank, on every rank.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when this rank holds more.
    pub fn with_capacity(self, capacity: usize) -> Result<Tokens> {
        let count = self.count;
        ensure(
            capacity >= count,
            "tokens",
            "capacity",
            || format!("at least the {count} tokens here"),
            || capacity.to_string(),
        )?;
        Ok(Tokens { capacity, ..self })
    }

    /// Tokens on the fullest rank.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens on this rank.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Tokens of a sequence.
    pub fn sequence(&self) -> usize {
        self.sequence
    }

    /// Sequences on this rank.
    pub fn sequences(&self) -> usize {
        self.count.checked_div(self.sequence).unwrap_or(0)
    }

    /// Gradient shards on this rank.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// Offsets of one group that holds every token: u32 `[2]`.
    pub fn whole(&self) -> &Tensor {
        &self.whole
    }

    /// Offsets of one group for each shard: u32 `[shards + 1]`.
    pub fn by_shard(&self) -> &Tensor {
        &self.by_shard
    }
}
