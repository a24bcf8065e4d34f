//! Which tokens go to which rank. NUMERICS.md, "Routing".

use super::{Arg, DType, NONE, OP, Values, distinct, index, indexable, number, op};
use crate::backend::{Backend, Caps};
use crate::error::Result;
use crate::tensor::Tensor;

/// The tokens t with `from <= t % period < to`: the same piece of every shard, for walking a layer in chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Tokens of a shard.
    pub period: usize,
    /// First token of the piece.
    pub from: usize,
    /// One past its last token.
    pub to: usize,
}

impl Window {
    /// Whether token t belongs to the window.
    pub fn contains(self, token: usize) -> bool {
        (self.from..self.to).contains(&(token % self.period))
    }

    /// Checks the window against a number of tokens and returns how many it holds.
    pub(in crate::ops) fn check(self, op: &'static str, tokens: usize) -> Result<usize> {
        let Window { period, from, to } = self;
        let ok = period > 0 && tokens.is_multiple_of(period) && from <= to && to <= period;
        number(op, "window", ok, &format!("a piece of a period that divides {tokens}"), format_args!("{self:?}"))?;
        Ok(tokens / period * (to - from))
    }
}

/// Which tokens go to which rank of the expert-parallel group, of `ranks` ranks. Its member r owns the experts
/// `r * experts / ranks ..`.
///
/// # Shape
/// ids: u32 `[tokens, k]`; rows: u32 `[ranks, capacity]`, the token of each row of each segment in token order, then
/// [`NONE`]; counts: u32 `[ranks]`; positions: u32 `[tokens, ranks]`, where each token went:
/// `rank * capacity + row`, or [`NONE`]. An id that is none of the experts is no choice.
///
/// # Numerics
/// Integers. capacity is at least the number of tokens in the window, so that no token can be dropped.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// The chosen experts.
    pub ids: &'a Tensor,
    /// Number of experts on all ranks of the group.
    pub experts: usize,
    /// Only these tokens; all if absent.
    pub window: Option<Window>,
    /// Written.
    pub rows: &'a Tensor,
    /// Written.
    pub counts: &'a Tensor,
    /// Written.
    pub positions: &'a Tensor,
}

op!(Plan: read(ids), write(rows, counts, positions), value(experts, window));

impl Plan<'_> {
    pub(super) fn check(&self, caps: &Caps) -> Result<()> {
        let ranks = caps.expert_ranks;
        let (tokens, k) = (self.ids.rows(), self.ids.cols());
        Arg::new(OP, "ids", self.ids).dtype(&[DType::U32])?.shape(&[tokens, k], "[tokens, k]")?;
        number(OP, "ids", k > 0, "at least one choice for each token", k)?;
        number(
            OP,
            "experts",
            self.experts > 0 && self.experts.is_multiple_of(ranks),
            &format!("a multiple of the {ranks} ranks"),
            self.experts,
        )?;
        let capacity = self.rows.cols();
        Arg::new(OP, "rows", self.rows).dtype(&[DType::U32])?.shape(&[ranks, capacity], "[ranks, capacity]")?;
        let worst = match self.window {
            None => tokens,
            Some(window) => window.check(OP, tokens)?,
        };
        number(OP, "rows", capacity >= worst, &format!("a capacity of at least {worst} rows"), capacity)?;
        Arg::new(OP, "counts", self.counts).dtype(&[DType::U32])?.len(ranks, "one for each rank")?;
        Arg::new(OP, "positions", self.positions).dtype(&[DType::U32])?.shape(&[tokens, ranks], "[tokens, ranks]")?;
        indexable("rows", self.rows)?;
        let outputs = [self.rows, self.counts, self.positions];
        for (i, out) in outputs.iter().enumerate() {
            let mut others = outputs[i + 1..].to_vec();
            others.push(self.ids);
            distinct(OP, "output", out, &others)?;
        }
        Ok(())
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let ids = Values::read(memory, self.ids)?;
        let [mut rows, mut counts, mut positions] = [
            Values::read(memory, self.rows)?,
            Values::read(memory, self.counts)?,
            Values::read(memory, self.positions)?,
        ];
        let (mut all_rows, mut all_counts, mut all_positions) = (rows.words(), counts.words(), positions.words());
        self.fill(&ids.words(), &mut all_rows, &mut all_counts, &mut all_positions);
        rows.set_words(&all_rows);
        counts.set_words(&all_counts);
        positions.set_words(&all_positions);
        [rows, counts, positions].iter().try_for_each(|values| values.write(memory))
    }

    /// Its work, in memory.
    pub(crate) fn fill(&self, ids: &[u32], rows: &mut [u32], counts: &mut [u32], positions: &mut [u32]) {
        let (k, ranks, capacity) = (self.ids.cols(), counts.len(), self.rows.cols());
        let experts_per_rank = self.experts / ranks;
        rows.fill(NONE);
        counts.fill(0);
        positions.fill(NONE);
        for (token, (choices, places)) in ids.chunks(k).zip(positions.chunks_mut(ranks)).enumerate() {
            if self.window.is_some_and(|window| !window.contains(token)) {
                continue;
            }
            for &id in choices.iter().filter(|&&id| (id as usize) < self.experts) {
                let rank = id as usize / experts_per_rank;
                // A token goes to a rank once, however many of its experts live there.
                if places[rank] == NONE {
                    let place = rank * capacity + counts[rank] as usize;
                    rows[place] = index(token);
                    places[rank] = index(place);
                    counts[rank] += 1;
                }
            }
        }
    }
}
