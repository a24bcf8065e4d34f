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
    for start in (0..len).step_by(RUN) {
        let lane = &mut lanes[(start / RUN) % LANES];
        for i in start..len.min(start + RUN) {
            *lane += terms(i);
        }
    }
    butterfly(lanes)
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
