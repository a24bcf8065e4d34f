//! What attention does to the scores of one row in one tile of keys: the specification. NUMERICS.md, "Attention".

use std::ops::Range;

use crate::numerics::special::ex2;
use crate::numerics::{math, reduce};

/// The columns of a tile of keys that `row` sees, when its first key is `start`; indices are counted within the sequence.
#[inline(always)]
pub(crate) fn visible(row: usize, start: usize, tile: &Range<usize>) -> Range<usize> {
    let end = tile.end.min(row + 1).max(tile.start);
    start.clamp(tile.start, end) - tile.start..end - tile.start
}

/// The softmax of one row as far as its tiles have been seen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnlineSoftmax {
    /// The largest score times the exponent's factor.
    max: f32,
    /// The sum of the probabilities relative to it.
    sum: f32,
}

impl OnlineSoftmax {
    /// No key seen.
    pub(crate) const EMPTY: OnlineSoftmax = OnlineSoftmax { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Turns the products of a tile into probabilities relative to the largest score so far; returns the factor that
    /// brings what was accumulated before to the same scale. `factor`: [`AttentionShape::exponent_factor`].
    ///
    /// [`AttentionShape::exponent_factor`]: super::AttentionShape::exponent_factor
    #[inline(always)]
    pub(crate) fn advance(&mut self, factor: f32, scores: &mut [f32], visible: Range<usize>) -> f32 {
        if visible.is_empty() {
            scores.fill(0.0);
            return 1.0;
        }
        scores[..visible.start].fill(0.0);
        scores[visible.end..].fill(0.0);
        let seen = &mut scores[visible];
        let max = larger(self.max, reduce::max(seen) * factor);
        let alpha = if self.max == f32::NEG_INFINITY { 0.0 } else { ex2(self.max - max) };
        exponentials(factor, max, seen);
        self.sum = self.sum * alpha + reduce::quad(scores);
        self.max = max;
        alpha
    }

    /// Multiplies what was accumulated by the reciprocal of the sum, and returns the log-sum-exp to base 2.
    #[inline(always)]
    pub(crate) fn finish(self, out: &mut [f32]) -> f32 {
        let reciprocal = if self.max == f32::NEG_INFINITY { 0.0 } else { 1.0 / self.sum };
        for o in out {
            // A chain that ended in -0 ends in +0.
            *o = (*o + 0.0) * reciprocal;
        }
        math::log(self.sum).mul_add(math::LOG2_E, self.max)
    }
}

/// Turns the products of a tile into probabilities, and the gradients `dp` of the probabilities into those of the scores.
#[inline(always)]
pub(crate) fn differentiate(
    factor: f32,
    lse: f32,
    delta: f32,
    scores: &mut [f32],
    dp: &mut [f32],
    visible: Range<usize>,
) {
    for hidden in [0..visible.start, visible.end..scores.len()] {
        scores[hidden.clone()].fill(0.0);
        dp[hidden].fill(0.0);
    }
    let seen = &mut scores[visible.clone()];
    exponentials(factor, lse, seen);
    for (s, dp) in seen.iter().zip(&mut dp[visible]) {
        *dp = *s * (*dp - delta);
    }
}

/// Products become probabilities relative to `from`.
///
/// Fused, the exponent of the largest product is not 0 but the rounding error of `from`. Where that would no longer be
/// small, both are rounded alike.
#[inline(always)]
fn exponentials(factor: f32, from: f32, scores: &mut [f32]) {
    const FUSED_BELOW: f32 = 16_777_216.0;
    if from.abs() < FUSED_BELOW {
        scores.iter_mut().for_each(|s| *s = ex2(s.mul_add(factor, -from)));
    } else {
        scores.iter_mut().for_each(|s| *s = ex2(*s * factor - from));
    }
}

/// The larger; a NaN counts for nothing.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_sees_the_keys_from_its_start_to_itself() {
        let tile = 128..256;
        assert_eq!(visible(127, 0, &tile), 0..0);
        assert_eq!(visible(128, 0, &tile), 0..1);
        assert_eq!(visible(200, 150, &tile), 22..73);
        assert_eq!(visible(300, 0, &tile), 0..128);
        assert!(visible(300, 256, &tile).is_empty());
        assert!(visible(200, 201, &tile).is_empty(), "a start past the row");
    }

    /// The probabilities of one row of one tile.
    fn softmax(mut scores: Vec<f32>, visible: Range<usize>) -> (Vec<f32>, f32) {
        let mut row = OnlineSoftmax::EMPTY;
        row.advance(math::LOG2_E, &mut scores, visible);
        let lse = row.finish(&mut scores);
        (scores, lse)
    }

    #[test]
    fn b255_masked_and_extreme_rows_are_finite() {
        assert_eq!(softmax(vec![3.0; 4], 0..0), (vec![0.0; 4], f32::NEG_INFINITY));
        assert_eq!(softmax(vec![-1e30; 2], 0..2).0, [0.5, 0.5]);
        let (p, lse) = softmax(vec![1000.0, 999.0], 0..2);
        assert!((p[0] - 0.731_058_6).abs() < 1e-6 && (p[1] - 0.268_941_4).abs() < 1e-6, "{p:?}");
        assert!((lse - 1_000.313_3 * math::LOG2_E).abs() < 2e-4, "{lse}");
        for extreme in [-2e38, -1e12, -2e7, 2e7, 1e12, 2e38] {
            let (p, lse) = softmax(vec![extreme; 2], 0..2);
            assert_eq!(p, [0.5, 0.5], "{extreme}");
            let (mut s, mut dp) = ([extreme], [1.0]);
            differentiate(math::LOG2_E, lse, 0.0, &mut s, &mut dp, 0..1);
            assert!(lse.is_infinite() || s[0].is_finite() && s[0] > 0.0, "{extreme}: {s:?}");
        }
    }

    #[test]
    fn infinite_scores_are_not_lost() {
        let inf = f32::INFINITY;
        // A largest score of either infinity, and finite ones whose exponents are.
        for scores in [[inf, 1.0], [-inf, -inf], [f32::NAN, -inf], [3e38, 3e38], [f32::NAN, 1.0]] {
            let (p, lse) = softmax(scores.to_vec(), 0..2);
            assert!(p.iter().all(|p| p.is_nan()) && lse.is_nan(), "{scores:?}: {p:?}, {lse}");
        }
        let (p, lse) = softmax(vec![-inf, 1.0], 0..2);
        assert_eq!((p, lse), (vec![0.0, 1.0], math::LOG2_E));
    }

    #[test]
    fn a_hidden_nan_stays_hidden() {
        let (p, _) = softmax(vec![f32::NAN, 1.0, f32::NAN], 1..2);
        assert_eq!(p, [0.0, 1.0, 0.0]);
        let (mut s, mut dp) = ([f32::NAN, 1.0, f32::NAN], [f32::NAN, 2.0, f32::NAN]);
        differentiate(1.0, 1.0, 0.5, &mut s, &mut dp, 1..2);
        assert_eq!((s, dp), ([0.0, 1.0, 0.0], [0.0, 1.5, 0.0]));
    }
}
