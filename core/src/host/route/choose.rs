//! The choice of experts by integer keys, which order as values and indices do. NUMERICS.md, "Routing".

use crate::ops::{NONE, Score, TopK};

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
pub(super) struct Chooser<'a> {
    op: TopK<'a>,
    bias: Option<&'a [f32]>,
    groups: Vec<u64>,
    experts: Vec<u64>,
}

impl<'a> Chooser<'a> {
    pub(super) fn new(op: TopK<'a>, bias: Option<&'a [f32]>) -> Self {
        Chooser { op, bias, groups: vec![0; op.top_groups], experts: vec![0; op.ids.cols()] }
    }

    /// One token, but for the counts.
    #[inline(always)]
    pub(super) fn token(
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
            self.op.weigh(scores, ids, weights);
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
