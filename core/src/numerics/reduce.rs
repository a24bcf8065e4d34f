//! The fixed orders of summation. NUMERICS.md, "Sums".

/// Lanes of a row reduction.
pub const LANES: usize = 32;
/// Consecutive elements that belong to one lane.
pub const RUN: usize = 8;
/// Rows of a block in the token-sum rule.
pub const TOKEN_BLOCK: usize = 128;

/// Row reduction of `terms(0) .. terms(len - 1)`: element i belongs to lane `(i / 8) % 32`; each lane adds its elements
/// in order from +0; then a butterfly over lane xor 16, 8, 4, 2, 1.
#[inline(always)]
pub fn row(len: usize, mut terms: impl FnMut(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    // The terms of one turn of the lanes are computed together, as vectors.
    let mut turn = [0.0f32; LANES * RUN];
    for start in (0..len).step_by(LANES * RUN) {
        let count = (len - start).min(LANES * RUN);
        for (term, i) in turn.iter_mut().zip(start..start + count) {
            *term = terms(i);
        }
        // A lane is never -0, since it starts at +0: adding +0 keeps its bits.
        turn[count..].fill(0.0);
        for (lane, run) in lanes.iter_mut().zip(turn.as_chunks::<RUN>().0) {
            for term in run {
                *lane += term;
            }
        }
    }
    butterfly(lanes)
}

/// The largest element; NaN is ignored, and -infinity stands for none.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (turns, rest) = x.as_chunks::<LANES>();
    for turn in turns {
        for (lane, &x) in lanes.iter_mut().zip(turn) {
            *lane = larger(*lane, x);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}

/// The token-sum rule: blocks of 128 terms, each added in order from its first term; the block sums added in order.
/// +0 for no terms.
pub fn tokens(len: usize, term: impl Fn(usize) -> f32) -> f32 {
    let block = |start: usize| (start + 1..len.min(start + TOKEN_BLOCK)).fold(term(start), |sum, i| sum + term(i));
    (0..len).step_by(TOKEN_BLOCK).map(block).reduce(|sum, block| sum + block).unwrap_or(0.0)
}

/// The butterfly's result, the same in every lane.
#[inline(always)]
pub fn butterfly(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The binary tree over the leaves `lo..hi`, absent leaves (None) skipped.
pub fn tree(lo: usize, hi: usize, leaf: &impl Fn(usize) -> Option<f32>) -> Option<f32> {
    if hi - lo <= 1 {
        return if hi > lo { leaf(lo) } else { None };
    }
    let mid = lo + (hi - lo) / 2;
    match (tree(lo, mid, leaf), tree(mid, hi, leaf)) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    }
}
