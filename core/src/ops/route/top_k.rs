//! Scores, and the choice of k experts for each token. NUMERICS.md, "Routing".

use super::balance::{Balance, probabilities, valid};
use super::{Arg, DType, NONE, OP, Values, distinct, index, number, op};
use crate::backend::Backend;
use crate::error::Result;
use crate::numerics::special::ex2;
use crate::numerics::{math, reduce};
use crate::tensor::Tensor;

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Score {
    /// `sigmoid(x)` (DeepSeek-V3).
    Sigmoid,
    /// `e / sum` with `e = ex2((x - max) * log2 e)` over all experts (Mixtral, Qwen3-MoE), the sum by row reduction. One
    /// NaN among the logits makes every score of the token NaN.
    Softmax,
}

/// Scores and the choice of k experts for each token.
///
/// # Shape
/// logits, scores: f32 `[tokens, experts]`; bias: f32 `[experts]`; valid: u32 `[tokens]` (0: padding);
/// ids: u32 `[tokens, k]`; weights: f32 `[tokens, k]`; counts: u32 `[experts]`.
///
/// # Numerics
/// All in f32. Selection value v = score + bias. With `groups` > 1 a group's value is the sum of its two largest v
/// (DeepSeek-V3), under `Softmax` its largest (DeepSeek-V2), and only the experts of the `top_groups` best groups are
/// candidates, whatever their sign. Order: value descending (a NaN last), index ascending on ties, for groups too; the k
/// choices are distinct. `weight = scale * (score / (sum + 1e-20))` with `normalize` (sum over the chosen in the order
/// chosen), else `scale * score`; the bias never enters. A padding token has ids [`NONE`] and weights 0; its scores are
/// written like any other's and go nowhere.
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

op!(TopK:
    read(logits, bias, valid),
    write(scores, ids, weights),
    update(counts),
    write(balance),
    value(score, groups, top_groups, normalize, scale)
);

/// The gradient of [`TopK`]: from the weights (and the auxiliary loss) to the logits.
///
/// # Shape
/// As [`TopK`]; d_weights: f32 `[tokens, k]`; d_logits: f32 `[tokens, experts]`.
///
/// # Numerics
/// The choice is constant, and an id that is none of the experts is no choice. d_logits of a token without a choice
/// (padding) is +0. Otherwise, with d = sum + 1e-20 and
/// r = score / d of each choice and dr = scale * d_weight, in f32:
/// - ds = (dr - (sum of dr * r in the order chosen)) / d with `normalize`, else ds = dr; +0 for the experts not chosen;
/// - [`Balance`] adds its part to ds of every expert;
/// - `Sigmoid`: d_logit = ds * (score * (1 - score)); `Softmax`: d_logit = score * (ds - row reduction of ds * score).
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

op!(TopKGrad: read(scores, ids, d_weights, balance), write(d_logits), value(score, normalize, scale));

impl TopK<'_> {
    /// Added to the sum of the chosen scores: keeps the weights of a token finite whose chosen scores are all 0.
    pub const GUARD: f32 = 1e-20;

    pub(super) fn check(&self) -> Result<()> {
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
            balance.check(tokens, experts)?;
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
    pub(super) fn check(&self) -> Result<()> {
        let (tokens, experts) = (self.scores.rows(), self.scores.cols());
        let k = self.ids.cols();
        number(OP, "ids", experts > 0 && k > 0, "at least one expert and choice", format_args!("{:?}", self.ids))?;
        Arg::new(OP, "scores", self.scores).dtype(&[DType::F32])?.shape(&[tokens, experts], "[tokens, experts]")?;
        Arg::new(OP, "ids", self.ids).dtype(&[DType::U32])?.shape(&[tokens, k], "[tokens, k]")?;
        Arg::new(OP, "d_weights", self.d_weights).dtype(&[DType::F32])?.shape(&[tokens, k], "[tokens, k]")?;
        Arg::new(OP, "d_logits", self.d_logits).dtype(&[DType::F32])?.shape(&[tokens, experts], "[tokens, experts]")?;
        let mut inputs = vec![self.scores, self.ids, self.d_weights];
        if let Some(balance) = &self.balance {
            balance.check(tokens, experts)?;
            inputs.push(balance.counts);
        }
        distinct(OP, "d_logits", self.d_logits, &inputs)
    }
}

impl Score {
    /// The scores of one token.
    #[inline(always)]
    pub(crate) fn of(self, logits: &[f32], scores: &mut [f32]) {
        match self {
            Score::Sigmoid => {
                for (score, &x) in scores.iter_mut().zip(logits) {
                    *score = math::sigmoid(x);
                }
            }
            Score::Softmax => {
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                for (e, &x) in scores.iter_mut().zip(logits) {
                    *e = ex2((x - max) * math::LOG2_E);
                }
                let sum = reduce::row(scores.len(), |e| scores[e]);
                for score in scores {
                    *score /= sum;
                }
            }
        }
    }

    /// Turns the gradient of one token's scores into that of its logits.
    #[inline(always)]
    fn back(self, scores: &[f32], d: &mut [f32]) {
        match self {
            Score::Sigmoid => {
                for (d, &score) in d.iter_mut().zip(scores) {
                    *d *= score * (1.0 - score);
                }
            }
            Score::Softmax => {
                let dot = reduce::row(d.len(), |e| d[e] * scores[e]);
                for (d, &score) in d.iter_mut().zip(scores) {
                    *d = score * (*d - dot);
                }
            }
        }
    }
}

impl TopK<'_> {
    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (logits, bias) = (Values::read(memory, self.logits)?, Values::read_opt(memory, self.bias)?);
        let valid = Values::read_opt(memory, self.valid)?;
        let (mut scores, mut ids) = (Values::read(memory, self.scores)?, Values::read(memory, self.ids)?);
        let (mut weights, mut counts) = (Values::read(memory, self.weights)?, Values::read(memory, self.counts)?);
        let (tokens, experts, k) = (self.logits.rows(), self.logits.cols(), self.ids.cols());
        let bias = bias.map_or(vec![], |bias| bias.floats());
        for token in 0..tokens {
            let mut row = vec![0.0; experts];
            self.score.of(&logits.row(token), &mut row);
            scores.set_row(token, &row);
            let (mut chosen, mut of_chosen) = (vec![NONE; k], vec![0.0; k]);
            if valid.as_ref().is_none_or(|valid| valid.word(token) != 0) {
                chosen = self.choose(&row, &bias);
                self.weigh(&row, &chosen, &mut of_chosen);
                chosen.iter().map(|&id| id as usize).for_each(|id| counts.set_word(id, counts.word(id) + 1));
            }
            chosen.iter().enumerate().for_each(|(i, &id)| ids.set_word(token * k + i, id));
            weights.set_row(token, &of_chosen);
        }
        if let Some(balance) = &self.balance {
            let (scores, ids) = (scores.floats(), ids.words());
            let (mut counts, mut loss) =
                (Values::read(memory, balance.counts)?.words(), Values::read(memory, balance.loss)?);
            for (i, counts) in counts.chunks_mut(experts).enumerate() {
                let sequence = balance.tokens_of(i, &scores, &ids, experts, k);
                sequence.count(counts);
                loss.set_float(i, sequence.loss(balance.coefficient, counts));
            }
            let mut of_sequences = Values::read(memory, balance.counts)?;
            of_sequences.set_words(&counts);
            of_sequences.write(memory)?;
            loss.write(memory)?;
        }
        [scores, ids, weights, counts].iter().try_for_each(|values| values.write(memory))
    }

    /// The experts of one token, the best first.
    fn choose(&self, scores: &[f32], bias: &[f32]) -> Vec<u32> {
        let value = |e: usize| bias.get(e).map_or(scores[e], |bias| scores[e] + bias);
        let size = scores.len() / self.groups;
        let members = |group: usize| (group * size..(group + 1) * size).map(|e| (value(e), e)).collect::<Vec<_>>();
        let groups = (0..self.groups).map(|group| match best(members(group), 2)[..] {
            [first, second] if self.score == Score::Sigmoid => (value(first) + value(second), group),
            [first, ..] => (value(first), group),
            [] => (0.0, group),
        });
        let groups = best(groups.collect(), self.top_groups);
        best(groups.into_iter().flat_map(members).collect(), self.ids.cols()).into_iter().map(index).collect()
    }

    /// The weights of one token's choices.
    #[inline(always)]
    pub(crate) fn weigh(&self, scores: &[f32], ids: &[u32], weights: &mut [f32]) {
        let TopK { normalize, scale, .. } = *self;
        let chosen = ids.iter().map(|&id| scores[id as usize]);
        let divisor = if normalize { chosen.clone().fold(0.0, |sum, score| sum + score) + TopK::GUARD } else { 1.0 };
        for (weight, score) in weights.iter_mut().zip(chosen) {
            *weight = scale * (score / divisor);
        }
    }
}

/// The indices of the `count` best of these values: value descending, NaN last, index ascending among equals.
fn best(mut values: Vec<(f32, usize)>, count: usize) -> Vec<usize> {
    values.sort_by(|(a, i), (b, j)| {
        let by_value = b.partial_cmp(a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()));
        by_value.then(i.cmp(j))
    });
    values.into_iter().take(count).map(|(_, i)| i).collect()
}

impl TopKGrad<'_> {
    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (scores, ids) = (Values::read(memory, self.scores)?.floats(), Values::read(memory, self.ids)?.words());
        let (d_weights, mut d_logits) = (Values::read(memory, self.d_weights)?, Values::read(memory, self.d_logits)?);
        let (experts, k) = (self.scores.cols(), self.ids.cols());
        let slopes = self.balance.map(|balance| balance.slopes(memory, &scores, &ids, k)).transpose()?;
        let (mut p, mut d) = (vec![0.0; experts], vec![0.0; experts]);
        for token in 0..self.scores.rows() {
            let (scores, ids) = (&scores[token * experts..][..experts], &ids[token * k..][..k]);
            let slopes = self.balance.zip(slopes.as_ref());
            let slopes = slopes.map(|(balance, all)| &all[token / balance.sequence * experts..][..experts]);
            self.token(scores, ids, &d_weights.row(token), slopes, &mut p, &mut d);
            d_logits.set_row(token, &d);
        }
        d_logits.write(memory)
    }

    /// The specification for one token: `d` receives the gradient of the logits; `slopes` are those of its sequence's
    /// [`Balance`]; `p` is scratch for its probabilities.
    #[inline(always)]
    pub(crate) fn token(
        &self,
        scores: &[f32],
        ids: &[u32],
        d_weights: &[f32],
        slopes: Option<&[f32]>,
        p: &mut [f32],
        d: &mut [f32],
    ) {
        d.fill(0.0);
        let experts = scores.len();
        if !valid(ids, experts) {
            return;
        }
        let chosen = ids.iter().zip(d_weights).filter(|&(&id, _)| (id as usize) < experts);
        let chosen = chosen.map(|(&id, &d_weight)| (id as usize, self.scale * d_weight));
        if self.normalize {
            let divisor = chosen.clone().fold(0.0, |sum, (e, _)| sum + scores[e]) + TopK::GUARD;
            let dot = chosen.clone().fold(0.0, |sum, (e, dr)| sum + dr * (scores[e] / divisor));
            chosen.for_each(|(e, dr)| d[e] = (dr - dot) / divisor);
        } else {
            chosen.for_each(|(e, dr)| d[e] = dr);
        }
        if let Some(slopes) = slopes {
            let sum = probabilities(scores, p);
            if sum != 0.0 {
                let dot = reduce::row(p.len(), |e| slopes[e] * p[e]);
                for (d, &slope) in d.iter_mut().zip(slopes) {
                    *d += (slope - dot) / sum;
                }
            }
        }
        self.score.back(scores, d);
    }
}
