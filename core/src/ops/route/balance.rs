//! The sequence-wise auxiliary loss of the router. NUMERICS.md, "Routing".

use super::{Arg, DType, OP, Values, number, tensors};
use crate::backend::Backend;
use crate::error::Result;
use crate::numerics::reduce;
use crate::tensor::Tensor;

/// The sequence-wise auxiliary loss of DeepSeek-V3 (arXiv 2412.19437, equations 17-20).
///
/// # Numerics
/// For a sequence with n > 0 valid tokens, in f32 and in this order:
/// - p = score / (row reduction of the token's scores); where that sum is 0, p = 1 / experts.
/// - P_e = (sum of p over the valid tokens by the token-sum rule: blocks of 128 positions, each from +0 in order of the
///   tokens, then the blocks in order) / n.
/// - f_e = (experts * count_e) / (k * n), where the last product is one of integers.
/// - loss = coefficient * (row reduction of f_e * P_e).
///
/// No score is too small: p does not depend on the magnitude of the scores, since nothing is added to their sum.
///
/// The gradient holds the counts constant. dL/dp_e = g_e = (coefficient * f_e) / n for every valid token; through the
/// division, (g_e - row reduction of g_j * p_j) / sum is added to the gradient of the score (nothing where the sum is 0).
/// A sequence without a valid token has loss 0.
#[derive(Clone, Copy, Debug)]
pub struct Balance<'a> {
    /// The coefficient of each sequence's loss, e.g. 1e-4 / sequences of the step.
    pub coefficient: f32,
    /// Tokens of a sequence; divides the number of tokens.
    pub sequence: usize,
    /// u32 `[sequences, experts]`: choices of each expert in each sequence. Written by [`super::TopK`].
    pub counts: &'a Tensor,
    /// f32 `[sequences]`: the loss. Written by [`super::TopK`], unused by [`super::TopKGrad`].
    pub loss: &'a Tensor,
}

tensors!(Balance: tensor(counts, loss), value(coefficient, sequence));

impl Balance<'_> {
    pub(super) fn check(&self, tokens: usize, experts: usize) -> Result<()> {
        let sequence = self.sequence;
        number(
            OP,
            "balance.sequence",
            sequence > 0 && tokens.is_multiple_of(sequence),
            &format!("a divisor of the {tokens} tokens"),
            sequence,
        )?;
        let sequences = tokens / sequence;
        Arg::new(OP, "balance.counts", self.counts)
            .dtype(&[DType::U32])?
            .shape(&[sequences, experts], "[sequences, experts]")?;
        Arg::new(OP, "balance.loss", self.loss).dtype(&[DType::F32])?.len(sequences, "one for each sequence")?;
        Ok(())
    }
}

impl Balance<'_> {
    /// The tokens of sequence i.
    pub(crate) fn tokens_of<'b>(
        &self,
        i: usize,
        scores: &'b [f32],
        ids: &'b [u32],
        experts: usize,
        k: usize,
    ) -> Sequence<'b> {
        let tokens = i * self.sequence..(i + 1) * self.sequence;
        Sequence {
            scores: &scores[tokens.start * experts..tokens.end * experts],
            ids: &ids[tokens.start * k..tokens.end * k],
            k,
            experts,
        }
    }

    /// g_e of every sequence.
    pub(crate) fn slopes(&self, memory: &dyn Backend, scores: &[f32], ids: &[u32], k: usize) -> Result<Vec<f32>> {
        let (counts, experts) = (Values::read(memory, self.counts)?.words(), self.counts.cols());
        let mut slopes = vec![0.0; counts.len()];
        for (i, (slopes, counts)) in slopes.chunks_mut(experts).zip(counts.chunks(experts)).enumerate() {
            self.tokens_of(i, scores, ids, experts, k).slopes(self.coefficient, counts, slopes);
        }
        Ok(slopes)
    }
}

/// The tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequence<'a> {
    /// `[tokens, experts]`.
    pub(crate) scores: &'a [f32],
    /// `[tokens, k]`.
    pub(crate) ids: &'a [u32],
    pub(crate) k: usize,
    pub(crate) experts: usize,
}

/// Whether a token with these choices is none of the padding: one of them is an expert.
#[inline(always)]
pub(super) fn valid(choices: &[u32], experts: usize) -> bool {
    choices.iter().any(|&id| (id as usize) < experts)
}

/// p of one token; returns the sum of its scores.
#[inline(always)]
pub(super) fn probabilities(scores: &[f32], p: &mut [f32]) -> f32 {
    let sum = reduce::row(scores.len(), |e| scores[e]);
    for (p, &score) in p.iter_mut().zip(scores) {
        *p = if sum == 0.0 { 1.0 / scores.len() as f32 } else { score / sum };
    }
    sum
}

impl Sequence<'_> {
    /// Choices of each expert, written.
    pub(crate) fn count(&self, counts: &mut [u32]) {
        counts.fill(0);
        for &id in self.ids.iter().filter(|&&id| (id as usize) < self.experts) {
            counts[id as usize] += 1;
        }
    }

    fn valid_tokens(&self) -> usize {
        self.ids.chunks(self.k).filter(|choices| valid(choices, self.experts)).count()
    }

    /// f_e for n valid tokens.
    fn load(&self, count: u32, n: usize) -> f32 {
        (self.experts as f32 * count as f32) / (self.k * n) as f32
    }

    /// The loss.
    pub(crate) fn loss(&self, coefficient: f32, counts: &[u32]) -> f32 {
        let n = self.valid_tokens();
        if n == 0 {
            return 0.0;
        }
        let mut total = vec![0.0f32; self.experts];
        let mut p = vec![0.0f32; self.experts];
        let blocks = self.scores.chunks(reduce::TOKEN_BLOCK * self.experts);
        for (scores, ids) in blocks.zip(self.ids.chunks(reduce::TOKEN_BLOCK * self.k)) {
            let mut block = vec![0.0f32; self.experts];
            for (scores, choices) in scores.chunks(self.experts).zip(ids.chunks(self.k)) {
                if valid(choices, self.experts) {
                    probabilities(scores, &mut p);
                    block.iter_mut().zip(&p).for_each(|(sum, p)| *sum += p);
                }
            }
            total.iter_mut().zip(&block).for_each(|(sum, block)| *sum += block);
        }
        coefficient * reduce::row(self.experts, |e| self.load(counts[e], n) * (total[e] / n as f32))
    }

    /// g_e, written; zeros without a valid token.
    pub(crate) fn slopes(&self, coefficient: f32, counts: &[u32], slopes: &mut [f32]) {
        let n = self.valid_tokens();
        for (slope, &count) in slopes.iter_mut().zip(counts) {
            *slope = if n == 0 { 0.0 } else { coefficient * self.load(count, n) / n as f32 };
        }
    }
}
