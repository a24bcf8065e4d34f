//! Scores, and the choice of k experts for each token. NUMERICS.md, "Routing".

use super::balance::{Balance, probabilities, valid};
use super::{Arg, DType, NONE, OP, distinct, number, op};
use crate::error::Result;
use crate::numerics::{math, reduce};
use crate::tensor::Tensor;

/// Keeps the weights of a token finite whose chosen scores are all 0.
const GUARD: f32 = 1e-20;

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Score {
    /// `1 / (1 + exp(-x))` (DeepSeek-V3).
    Sigmoid,
    /// `exp(x - max) / sum` over all experts (Mixtral, Qwen3-MoE), the sum by row reduction. One NaN among the logits
    /// makes every score of the token NaN.
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
/// The choice is constant. d_logits of a padding token (all ids [`NONE`]) is +0. Otherwise, with d = sum + 1e-20 and
/// r = score / d of each choice and dr = scale * d_weight, in f32:
/// - ds = (dr - (sum of dr * r in the order chosen)) / d with `normalize`, else ds = dr; +0 for the experts not chosen;
/// - [`Balance`] adds its part to ds of every expert;
/// - `Sigmoid`: d_logit = ds * (score * (1 - score)); `Softmax`: d_logit = score * (ds - row reduction of ds * score).
///
/// # Errors
/// [`crate::Error::Argument`] when an id is not one of the experts.
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
    fn of(self, logits: &[f32], scores: &mut [f32]) {
        match self {
            Score::Sigmoid => {
                for (score, &x) in scores.iter_mut().zip(logits) {
                    *score = math::sigmoid(x);
                }
            }
            Score::Softmax => {
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                for (e, &x) in scores.iter_mut().zip(logits) {
                    *e = math::exp(x - max);
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

/// A value and its index as one integer: the larger, the better. Value descending, NaN last, then index ascending.
#[inline(always)]
fn key(value: f32, index: usize) -> u64 {
    // Adding +0 makes the two zeros one.
    let bits = (value + 0.0).to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    let ordered = if value.is_nan() { 0 } else { ordered };
    u64::from(ordered) << 32 | (u64::from(u32::MAX) - index as u64)
}

/// The index in a key.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the lower half of the key")]
fn index_of(key: u64) -> u32 {
    !(key as u32)
}

/// The value in a key.
#[inline(always)]
fn value_of(key: u64) -> f32 {
    match (key >> 32) as u32 {
        0 => f32::NAN,
        ordered if ordered >> 31 == 1 => f32::from_bits(ordered & !(1 << 31)),
        ordered => f32::from_bits(!ordered),
    }
}

/// Fills `best` with the largest keys, in descending order.
#[inline(always)]
fn largest(keys: impl Iterator<Item = u64>, best: &mut [u64]) {
    best.fill(0);
    for key in keys {
        let mut place = best.len();
        while place > 0 && key > best[place - 1] {
            place -= 1;
        }
        if place < best.len() {
            best[place..].rotate_right(1);
            best[place] = key;
        }
    }
}

/// Chooses experts token by token, with memory of its own for the candidates.
#[derive(Debug)]
pub(crate) struct Chooser<'a> {
    op: TopK<'a>,
    bias: Option<&'a [f32]>,
    groups: Vec<u64>,
    experts: Vec<u64>,
}

impl<'a> Chooser<'a> {
    pub(crate) fn new(op: TopK<'a>, bias: Option<&'a [f32]>) -> Self {
        Chooser { op, bias, groups: vec![0; op.top_groups], experts: vec![0; op.ids.cols()] }
    }

    /// The specification of [`TopK`] for one token, but for the counts.
    #[inline(always)]
    pub(crate) fn token(
        &mut self,
        logits: &[f32],
        valid: bool,
        scores: &mut [f32],
        ids: &mut [u32],
        weights: &mut [f32],
    ) {
        self.op.score.of(logits, scores);
        if valid {
            self.choose(scores, ids);
            self.weigh(scores, ids, weights);
        } else {
            ids.fill(NONE);
            weights.fill(0.0);
        }
    }

    #[inline(always)]
    fn choose(&mut self, scores: &[f32], ids: &mut [u32]) {
        let size = scores.len() / self.op.groups;
        let bias = self.bias;
        let keys = |group: usize| {
            let value = move |e: usize| bias.map_or(scores[e], |bias| scores[e] + bias[e]);
            (group * size..(group + 1) * size).map(move |e| key(value(e), e))
        };
        if self.op.groups == 1 {
            largest(keys(0), &mut self.experts);
        } else {
            let values = (0..self.op.groups).map(|group| {
                let mut two = [0; 2];
                largest(keys(group), &mut two);
                let alone = self.op.score == Score::Softmax || size == 1;
                let value = if alone { value_of(two[0]) } else { value_of(two[0]) + value_of(two[1]) };
                key(value, group)
            });
            largest(values, &mut self.groups);
            let candidates = self.groups.iter().flat_map(|&group| keys(index_of(group) as usize));
            largest(candidates, &mut self.experts);
        }
        for (id, &key) in ids.iter_mut().zip(&self.experts) {
            *id = index_of(key);
        }
    }

    #[inline(always)]
    fn weigh(&self, scores: &[f32], ids: &[u32], weights: &mut [f32]) {
        let TopK { normalize, scale, .. } = self.op;
        let chosen = ids.iter().map(|&id| scores[id as usize]);
        let divisor = if normalize { chosen.clone().fold(0.0, |sum, score| sum + score) + GUARD } else { 1.0 };
        for (weight, score) in weights.iter_mut().zip(chosen) {
            *weight = scale * (score / divisor);
        }
    }
}

impl TopKGrad<'_> {
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
        if !valid(ids) {
            return;
        }
        let chosen = ids.iter().zip(d_weights).filter(|&(&id, _)| id != NONE);
        let chosen = chosen.map(|(&id, &d_weight)| (id as usize, self.scale * d_weight));
        if self.normalize {
            let divisor = chosen.clone().fold(0.0, |sum, (e, _)| sum + scores[e]) + GUARD;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_values_then_indices() {
        let ascending = [f32::NAN, f32::NEG_INFINITY, -2.0, -1e-45, 0.0, 1e-45, 1.0, f32::INFINITY];
        for (i, &a) in ascending.iter().enumerate() {
            for (j, &b) in ascending.iter().enumerate() {
                let expected = i.cmp(&j).then(1.cmp(&0));
                assert_eq!(key(a, 0).cmp(&key(b, 1)), expected, "{a} at 0 against {b} at 1");
            }
            assert_eq!((index_of(key(a, i)), value_of(key(a, i)).to_bits()), (index(i), a.to_bits()));
        }
        assert_eq!(key(-0.0, 5), key(0.0, 5));
        assert!(key(-f32::NAN, 0) < key(f32::NEG_INFINITY, 1));
    }

    fn index(i: usize) -> u32 {
        u32::try_from(i).unwrap()
    }

    #[test]
    fn the_largest_come_in_descending_order() {
        let mut best = [0; 3];
        largest([3, 9, 1, 7, 8].into_iter(), &mut best);
        assert_eq!(best, [9, 8, 7]);
    }
}
