//! The layout of the tokens of one micro-batch on a rank.

use std::ops::Range;

use dropless_core::error::{Result, ensure};
use dropless_core::{Backend, Group};
use dropless_core::{DType, Tensor};

/// The tokens of a micro-batch on one rank: whole sequences, in contiguous, equal gradient shards.
///
/// NUMERICS.md, "Gradient shards and ranks": a weight gradient is one product chain for each shard, so a digest does not
/// depend on the number of ranks.
#[derive(Clone, Debug)]
pub struct Tokens {
    count: usize,
    capacity: usize,
    sequence: usize,
    shards: usize,
    /// Tokens of a gradient shard.
    period: usize,
    whole: Tensor,
    by_shard: Tensor,
    /// Expert shards; empty if there is one.
    pieces: Vec<Piece>,
}

/// An expert shard, as far as it lies on this rank.
#[derive(Clone, Debug)]
struct Piece {
    from: usize,
    tokens: Tokens,
}

impl Tokens {
    /// `sequences` sequences of `sequence` tokens in `shards` shards.
    ///
    /// # Errors
    /// [`dropless_core::Error::Argument`] when the shards do not divide the sequences.
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
            period: count / shards,
            whole: backend.upload(DType::U32, &[2], &offsets(1))?,
            by_shard: backend.upload(DType::U32, &[shards + 1], &offsets(shards))?,
            pieces: Vec::new(),
        })
    }

    /// The same, when the tokens of all ranks form `shards` equal, contiguous expert shards: each is one chain of the expert
    /// weights' gradients. The ranks that share this rank's experts own equally many; each may lie on several of them, or
    /// several on one.
    ///
    /// # Errors
    /// [`dropless_core::Error::Argument`] when the replicas of the experts do not divide the expert shards, or the
    /// expert shards here the gradient shards here.
    pub fn with_expert_shards(self, backend: &dyn Backend, shards: usize) -> Result<Tokens> {
        let caps = backend.caps();
        let replicas = caps.size(Group::Replicas);
        ensure(
            shards > 0 && shards.is_multiple_of(replicas),
            "tokens",
            "expert_shards",
            || format!("a multiple of the {replicas} replicas of the experts"),
            || shards.to_string(),
        )?;
        // Edges count gradient shards of the ranks that share experts.
        let (here, all) = (shards / replicas, self.shards * caps.size(Group::Experts));
        ensure(
            all.is_multiple_of(here),
            "tokens",
            "expert_shards",
            || format!("a divisor of the {} gradient shards", all * replicas),
            || shards.to_string(),
        )?;
        if here == 1 {
            return Ok(self);
        }
        let (len, first) = (all / here, self.shards * caps.place(Group::Experts));
        let on_this_rank = |edge: usize| edge.clamp(first, first + self.shards) - first;
        let piece = |index: usize| {
            let (from, to) = (on_this_rank(index * len), on_this_rank((index + 1) * len));
            let sequences = self.sequences() / self.shards * (to - from);
            let tokens = Tokens::new(backend, sequences, self.sequence, (to - from).max(1))?;
            let capacity = self.period * len.min(self.shards);
            Ok(Piece { from: self.period * from, tokens: Tokens { capacity, period: self.period, ..tokens } })
        };
        let pieces = (0..here).map(piece).collect::<Result<_>>()?;
        Ok(Tokens { pieces, ..self })
    }

    /// The same, when ranks hold different numbers of tokens: `capacity` is that of the fullest rank, on every rank.
    ///
    /// # Errors
    /// [`dropless_core::Error::Argument`] when this rank holds more.
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

    /// Tokens of a gradient shard.
    pub fn period(&self) -> usize {
        self.period
    }

    /// The expert shards of the ranks that share this rank's experts, in order: which of this rank's tokens belong to each.
    pub fn expert_shards(&self) -> impl Iterator<Item = (Range<usize>, &Tokens)> {
        let one = self.pieces.is_empty().then_some((0..self.count, self));
        one.into_iter().chain(self.pieces.iter().map(|p| (p.from..p.from + p.tokens.count, &p.tokens)))
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
