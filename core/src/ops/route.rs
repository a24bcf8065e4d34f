//! From router logits to a sorted ragged layout, all on the device. NUMERICS.md, "Routing".
//!
//! [`TopK`] chooses experts, [`Plan`] lists the tokens that each rank must receive (a token once per rank, however many
//! of its experts live there), [`Layout`] sorts what a rank received by expert. [`TopKGrad`] is the way back.

use super::{Arg, Checked, DType, distinct, number};
use crate::backend::{Backend, Caps};
use crate::error::Result;
use crate::tensor::Tensor;

/// In an index: no row, no slot, no expert.
pub const NONE: u32 = u32::MAX;

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Score {
    /// `1 / (1 + exp(-x))` (DeepSeek-V3).
    Sigmoid,
    /// `exp(x - max) / sum` over all experts (Mixtral, Qwen3-MoE).
    Softmax,
}

/// The sequence-wise auxiliary loss of DeepSeek-V3 (arXiv 2412.19437, equations 17-20).
///
/// # Numerics
/// With p = scores / (their sum over the experts) for each valid token of a sequence, P_e = its mean over the valid
/// tokens, f_e = experts / (k * tokens) * count_e: `loss = coefficient * sum over e of f_e P_e`, one for each sequence.
#[derive(Clone, Copy, Debug)]
pub struct Balance<'a> {
    /// The coefficient of each sequence's loss, e.g. 1e-4 / sequences of the step.
    pub coefficient: f32,
    /// Tokens of a sequence; divides the number of tokens.
    pub sequence: usize,
    /// u32 `[sequences, experts]`: choices of each expert in each sequence. Written by [`TopK`].
    pub counts: &'a Tensor,
    /// f32 `[sequences]`: the loss. Written by [`TopK`], unused by [`TopKGrad`].
    pub loss: &'a Tensor,
}

/// Scores and the choice of k experts for each token.
///
/// # Shape
/// logits, scores: f32 `[tokens, experts]`; bias: f32 `[experts]`; valid: u32 `[tokens]` (0: padding);
/// ids: u32 `[tokens, k]`; weights: f32 `[tokens, k]`; counts: u32 `[experts]`.
///
/// # Numerics
/// Selection value v = score + bias. With `groups` > 1 a group's value is the sum of its two largest v (its largest,
/// without bias under `Softmax`), and only the `top_groups` best groups take part. Order: value descending (a NaN last),
/// index ascending on ties, for groups too. `weight = scale * score / (sum + 1e-20)` with `normalize` (sum over the
/// chosen in the order chosen), else `scale * score`; the bias never enters. A padding token has ids [`NONE`] and
/// weights 0.
///
/// # Errors
/// [`crate::Error::Argument`], e.g. k larger than the experts of `top_groups` groups.
#[derive(Clone, Copy, Debug)]
pub struct TopK<'a> {
    /// Router logits.
    pub logits: &'a Tensor,
    /// Selection bias of each expert.
    pub bias: Option<&'a Tensor>,
    /// Which tokens are not padding; all if absent.
    pub valid: Option<&'a Tensor>,
    /// Score function.
    pub score: Score,
    /// Expert groups; 1 for none.
    pub groups: usize,
    /// Groups that take part.
    pub top_groups: usize,
    /// Divide the weights by their sum.
    pub normalize: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// The scores, written.
    pub scores: &'a Tensor,
    /// The chosen experts, written.
    pub ids: &'a Tensor,
    /// Their weights, written.
    pub weights: &'a Tensor,
    /// Choices of each expert, **added to** what is there.
    pub counts: &'a Tensor,
    /// Sequence-wise auxiliary loss.
    pub balance: Option<Balance<'a>>,
}

/// The gradient of [`TopK`]: from the weights (and the auxiliary loss) to the logits.
///
/// # Shape
/// As [`TopK`]; d_weights: f32 `[tokens, k]`; d_logits: f32 `[tokens, experts]`.
///
/// # Numerics
/// The choice is constant. d_logits of a padding token is 0. The formulas are those of [`TopK`], differentiated;
/// NUMERICS.md, "Routing", gives the order of the sums.
#[derive(Clone, Copy, Debug)]
pub struct TopKGrad<'a> {
    /// The scores of [`TopK`].
    pub scores: &'a Tensor,
    /// The chosen experts.
    pub ids: &'a Tensor,
    /// Gradient of the weights.
    pub d_weights: &'a Tensor,
    /// Score function.
    pub score: Score,
    /// As in [`TopK`].
    pub normalize: bool,
    /// As in [`TopK`].
    pub scale: f32,
    /// As in [`TopK`], counts read.
    pub balance: Option<Balance<'a>>,
    /// Gradient of the logits, written.
    pub d_logits: &'a Tensor,
}

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
    pub(super) fn check(self, op: &'static str, tokens: usize) -> Result<usize> {
        let Window { period, from, to } = self;
        let ok = period > 0 && tokens.is_multiple_of(period) && from <= to && to <= period;
        number(op, "window", ok, &format!("a piece of a period that divides {tokens}"), format_args!("{self:?}"))?;
        Ok(tokens / period * (to - from))
    }
}

/// Which tokens go to which rank. Rank r owns experts `r * experts / ranks ..`.
///
/// # Shape
/// ids: u32 `[tokens, k]`; rows: u32 `[ranks, capacity]`, the token of each row of each chunk in token order, then
/// [`NONE`]; counts: u32 `[ranks]`; positions: u32 `[tokens, ranks]`, where each token went:
/// `rank * capacity + row`, or [`NONE`].
///
/// # Numerics
/// Integers. capacity is at least the number of tokens in the window, so that no token can be dropped.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// The chosen experts.
    pub ids: &'a Tensor,
    /// Number of experts on all ranks.
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

/// The received rows sorted by local expert; within an expert in the order of the rows (that is, of global tokens).
///
/// # Shape
/// ids: u32 `[chunks, capacity, k]`; counts: u32 `[chunks]` (rows that count in each chunk); weights: f32 as ids;
/// offsets: u32 `[local experts + 1]`; slot_rows: u32 `[slots]`, the row `chunk * capacity + i` of each slot, then
/// [`NONE`]; slot_weights: f32 `[slots]`; row_slots: u32 as ids, the slot of each (row, choice), or [`NONE`] for a choice
/// that lives elsewhere and for rows past the count.
///
/// # Numerics
/// Integers, and copies of weights. `slots` is at least `chunks * capacity * min(k, local experts)`.
#[derive(Clone, Copy, Debug)]
pub struct Layout<'a> {
    /// The chosen experts of each row, as global ids.
    pub ids: &'a Tensor,
    /// Rows of each chunk.
    pub counts: &'a Tensor,
    /// Their weights.
    pub weights: &'a Tensor,
    /// The first expert of this rank.
    pub first_expert: usize,
    /// Written.
    pub offsets: &'a Tensor,
    /// Written.
    pub slot_rows: &'a Tensor,
    /// Written up to `offsets[local experts]`.
    pub slot_weights: &'a Tensor,
    /// Written.
    pub row_slots: &'a Tensor,
}

/// A step of routing.
#[derive(Clone, Copy, Debug)]
pub enum Route<'a> {
    /// See [`TopK`].
    TopK(TopK<'a>),
    /// See [`TopKGrad`].
    TopKGrad(TopKGrad<'a>),
    /// See [`Plan`].
    Plan(Plan<'a>),
    /// See [`Layout`].
    Layout(Layout<'a>),
}

const OP: &str = "route";

impl Route<'_> {
    /// Checks the arguments.
    ///
    /// # Errors
    /// See the variants.
    pub fn check(self, caps: &Caps) -> Result<Checked<Self>> {
        match &self {
            Route::TopK(op) => op.check()?,
            Route::TopKGrad(op) => op.check()?,
            Route::Plan(op) => op.check(caps)?,
            Route::Layout(op) => op.check()?,
        }
        Ok(Checked::new(self))
    }

    /// Checks and queues.
    ///
    /// # Errors
    /// See the variants; a failure of the device.
    pub fn run(self, backend: &dyn Backend) -> Result<()> {
        let _span = tracing::trace_span!(OP).entered();
        backend.route(&self.check(backend.caps())?)
    }
}

fn check_balance(balance: &Balance<'_>, tokens: usize, experts: usize) -> Result<()> {
    let sequence = balance.sequence;
    number(
        OP,
        "balance.sequence",
        sequence > 0 && tokens.is_multiple_of(sequence),
        &format!("a divisor of the {tokens} tokens"),
        sequence,
    )?;
    let sequences = tokens / sequence;
    Arg::new(OP, "balance.counts", balance.counts)
        .dtype(&[DType::U32])?
        .shape(&[sequences, experts], "[sequences, experts]")?;
    Arg::new(OP, "balance.loss", balance.loss).dtype(&[DType::F32])?.len(sequences, "one for each sequence")?;
    Ok(())
}

impl TopK<'_> {
    fn check(&self) -> Result<()> {
        let (tokens, experts) = (self.logits.rows(), self.logits.cols());
        let k = self.ids.cols();
        Arg::new(OP, "logits", self.logits).dtype(&[DType::F32])?.shape(&[tokens, experts], "[tokens, experts]")?;
        number(OP, "logits", experts > 0, "at least one expert", experts)?;
        number(
            OP,
            "groups",
            self.groups > 0 && experts.is_multiple_of(self.groups),
            &format!("a divisor of the {experts} experts"),
            self.groups,
        )?;
        number(
            OP,
            "top_groups",
            (1..=self.groups).contains(&self.top_groups),
            &format!("between 1 and the {} groups", self.groups),
            self.top_groups,
        )?;
        let eligible = self.top_groups * (experts / self.groups);
        number(OP, "k", (1..=eligible).contains(&k), &format!("between 1 and the {eligible} eligible experts"), k)?;
        if let Some(bias) = self.bias {
            Arg::new(OP, "bias", bias).dtype(&[DType::F32])?.len(experts, "one for each expert")?;
        }
        if let Some(valid) = self.valid {
            Arg::new(OP, "valid", valid).dtype(&[DType::U32])?.len(tokens, "one for each token")?;
        }
        Arg::new(OP, "scores", self.scores).dtype(&[DType::F32])?.shape(&[tokens, experts], "[tokens, experts]")?;
        Arg::new(OP, "ids", self.ids).dtype(&[DType::U32])?.shape(&[tokens, k], "[tokens, k]")?;
        Arg::new(OP, "weights", self.weights).dtype(&[DType::F32])?.shape(&[tokens, k], "[tokens, k]")?;
        Arg::new(OP, "counts", self.counts).dtype(&[DType::U32])?.len(experts, "one for each expert")?;
        let mut outputs = vec![self.scores, self.ids, self.weights, self.counts];
        if let Some(balance) = &self.balance {
            check_balance(balance, tokens, experts)?;
            outputs.extend([balance.counts, balance.loss]);
        }
        for (i, out) in outputs.iter().enumerate() {
            let mut others = outputs[i + 1..].to_vec();
            others.push(self.logits);
            others.extend(self.bias);
            others.extend(self.valid);
            distinct(OP, "output", out, &others)?;
        }
        Ok(())
    }
}

impl TopKGrad<'_> {
    fn check(&self) -> Result<()> {
        let (tokens, experts) = (self.scores.rows(), self.scores.cols());
        let k = self.ids.cols();
        Arg::new(OP, "scores", self.scores).dtype(&[DType::F32])?.shape(&[tokens, experts], "[tokens, experts]")?;
        Arg::new(OP, "ids", self.ids).dtype(&[DType::U32])?.shape(&[tokens, k], "[tokens, k]")?;
        Arg::new(OP, "d_weights", self.d_weights).dtype(&[DType::F32])?.shape(&[tokens, k], "[tokens, k]")?;
        Arg::new(OP, "d_logits", self.d_logits).dtype(&[DType::F32])?.shape(&[tokens, experts], "[tokens, experts]")?;
        let mut inputs = vec![self.scores, self.ids, self.d_weights];
        if let Some(balance) = &self.balance {
            check_balance(balance, tokens, experts)?;
            inputs.push(balance.counts);
        }
        distinct(OP, "d_logits", self.d_logits, &inputs)
    }
}

impl Plan<'_> {
    fn check(&self, caps: &Caps) -> Result<()> {
        let ranks = caps.ranks;
        let tokens = self.ids.rows();
        Arg::new(OP, "ids", self.ids).dtype(&[DType::U32])?;
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
        let outputs = [self.rows, self.counts, self.positions];
        for (i, out) in outputs.iter().enumerate() {
            let mut others = outputs[i + 1..].to_vec();
            others.push(self.ids);
            distinct(OP, "output", out, &others)?;
        }
        Ok(())
    }
}

impl Layout<'_> {
    fn check(&self) -> Result<()> {
        let shape = self.ids.shape();
        number(OP, "ids", shape.len() == 3, "[chunks, capacity, k]", format_args!("{:?}", self.ids))?;
        let [chunks, capacity, k] = [shape[0], shape[1], shape[2]];
        Arg::new(OP, "ids", self.ids).dtype(&[DType::U32])?;
        Arg::new(OP, "counts", self.counts).dtype(&[DType::U32])?.len(chunks, "one for each chunk")?;
        Arg::new(OP, "weights", self.weights).dtype(&[DType::F32])?.shape(shape, "as ids")?;
        let local = self.offsets.len().saturating_sub(1);
        number(OP, "offsets", local > 0, "at least 2 entries (local experts + 1)", self.offsets.len())?;
        Arg::new(OP, "offsets", self.offsets).dtype(&[DType::U32])?;
        let worst = chunks * capacity * k.min(local);
        number(
            OP,
            "slot_rows",
            self.slot_rows.len() >= worst,
            &format!("at least {worst} slots (every choice of every row)"),
            self.slot_rows.len(),
        )?;
        Arg::new(OP, "slot_rows", self.slot_rows).dtype(&[DType::U32])?;
        Arg::new(OP, "slot_weights", self.slot_weights)
            .dtype(&[DType::F32])?
            .len(self.slot_rows.len(), "one for each slot")?;
        Arg::new(OP, "row_slots", self.row_slots).dtype(&[DType::U32])?.shape(shape, "as ids")?;
        let outputs = [self.offsets, self.slot_rows, self.slot_weights, self.row_slots];
        for (i, out) in outputs.iter().enumerate() {
            let mut others = outputs[i + 1..].to_vec();
            others.extend([self.ids, self.counts, self.weights]);
            distinct(OP, "output", out, &others)?;
        }
        Ok(())
    }
}
