//! What attention does to the scores of one row in one tile of keys: the specification. NUMERICS.md, "Attention".

use std::ops::Range;

use crate::numerics::math;

/// The columns of a tile of keys that `row` sees, when its first key is `start`; indices are counted within the sequence.
#[inline(always)]
pub(crate) fn visible(row: usize, start: usize, tile: &Range<usize>) -> Range<usize> {
    let end = tile.end.min(row + 1).max(tile.start);
    start.clamp(tile.start, end) - tile.start..end - tile.start
}

/// The softmax of one row as far as its tiles have been seen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnlineSoftmax {
    /// The largest score.
    max: f32,
    /// The sum of exp(score - max).
    sum: f32,
}

impl OnlineSoftmax {
    /// No key seen.
    pub(crate) const EMPTY: OnlineSoftmax = OnlineSoftmax { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Turns the products of a tile into probabilities relative to the largest score so far; returns the factor that
    /// brings what was accumulated before to the same scale.
    #[inline(always)]
    pub(crate) fn advance(&mut self, scale: f32, scores: &mut [f32], visible: Range<usize>) -> f32 {
        if visible.is_empty() {
            scores.fill(0.0);
            return 1.0;
        }
        scores[..visible.start].fill(0.0);
        scores[visible.end..].fill(0.0);
        let seen = &mut scores[visible];
        for s in seen.iter_mut() {
            *s *= scale;
        }
        let max = larger(self.max, largest(seen));
        let alpha = if self.max == f32::NEG_INFINITY { 0.0 } else { math::exp(self.max - max) };
        for s in seen {
            *s = math::exp(*s - max);
        }
        self.sum = self.sum * alpha + sum(scores);
        self.max = max;
        alpha
    }

    /// Divides what was accumulated by the sum, and returns the log-sum-exp.
    #[inline(always)]
    pub(crate) fn finish(self, out: &mut [f32]) -> f32 {
        for o in out {
            // A chain that ended in -0 ends in +0.
            *o = if self.sum == 0.0 { 0.0 } else { (*o + 0.0) / self.sum };
        }
        self.max + math::log(self.sum)
    }
}

/// Turns the products of a tile into probabilities, and the gradients `dp` of the probabilities into those of the scores.
#[inline(always)]
pub(crate) fn differentiate(
    scale: f32,
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
    for (s, dp) in scores[visible.clone()].iter_mut().zip(&mut dp[visible]) {
        *s = math::exp(*s * scale - lse);
        *dp = *s * (*dp - delta);
    }
}

/// The larger; a NaN counts for nothing.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The largest score, found in lanes, which change no bit of it.
#[inline(always)]
fn largest(scores: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = scores.as_chunks::<16>();
    for chunk in chunks {
        for (lane, &s) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, s);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &s| larger(max, s))
}

/// The sum of a tile's probabilities in four lanes, each of which has two neighbouring columns of every eight: those
/// that one thread holds of a tensor core's result.
#[inline(always)]
fn sum(p: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 4];
    let (chunks, rest) = p.as_chunks::<8>();
    for chunk in chunks {
        for (column, p) in chunk.iter().enumerate() {
            lanes[column / 2] += p;
        }
    }
    for (column, p) in rest.iter().enumerate() {
        lanes[column / 2] += p;
    }
    (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
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
        row.advance(1.0, &mut scores, visible);
        let lse = row.finish(&mut scores);
        (scores, lse)
    }

    #[test]
    fn b255_masked_and_extreme_rows_are_finite() {
        assert_eq!(softmax(vec![3.0; 4], 0..0), (vec![0.0; 4], f32::NEG_INFINITY));
        assert_eq!(softmax(vec![-1e30; 2], 0..2).0, [0.5, 0.5]);
        let (p, lse) = softmax(vec![1000.0, 999.0], 0..2);
        assert!((p[0] - 0.731_058_6).abs() < 1e-6 && (p[1] - 0.268_941_4).abs() < 1e-6, "{p:?}");
        assert!((lse - 1_000.313_3).abs() < 1e-4, "{lse}");
    }

    #[test]
    fn the_lanes_hold_pairs_of_columns() {
        // 2^24 absorbs a 1 that is added to it, so the order shows.
        let mut p = vec![0.0; 13];
        (p[0], p[1], p[8], p[2]) = (16_777_216.0, 1.0, 1.0, 1.0);
        assert_eq!(sum(&p), 16_777_216.0);
        p[4] = 2.0;
        assert_eq!(sum(&p), 16_777_218.0, "lane 2 joins after lanes 0 and 1");
        (p[0], p[11], p[12]) = (0.0, 5.0, 7.0);
        assert_eq!(sum(&p), 1.0 + 1.0 + 1.0 + 2.0 + 5.0 + 7.0);
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
