//! The fixed orders of summation. NUMERICS.md, "Sums".

/// Lanes of a row reduction.
pub const LANES: usize = 32;
/// Consecutive elements that belong to one lane.
pub const RUN: usize = 8;
/// Rows of a block in the token-sum rule.
pub const TOKEN_BLOCK: usize = 128;
/// Columns of a block in the quad-sum rule.
pub const QUAD_BLOCK: usize = 256;

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

/// The quad rule for one block of columns: 4 lanes, each of which has two neighbouring columns of every eight (those that
/// one thread holds of a tensor core's result) and adds them in order from +0; then (lane 0 + lane 1) + (lane 2 + lane 3).
#[inline(always)]
pub fn quad(terms: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 4];
    let (chunks, rest) = terms.as_chunks::<8>();
    for chunk in chunks {
        for (column, term) in chunk.iter().enumerate() {
            lanes[column / 2] += term;
        }
    }
    for (column, term) in rest.iter().enumerate() {
        lanes[column / 2] += term;
    }
    (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
}

/// The quad-sum rule for `terms(0) .. terms(len - 1)`: blocks of [`QUAD_BLOCK`] columns by [`quad`], added in order from +0.
#[inline(always)]
pub fn quads(len: usize, mut terms: impl FnMut(usize) -> f32) -> f32 {
    let (mut total, mut block) = (0.0, [0.0f32; QUAD_BLOCK]);
    for start in (0..len).step_by(QUAD_BLOCK) {
        let count = (len - start).min(QUAD_BLOCK);
        for (term, i) in block.iter_mut().zip(start..start + count) {
            *term = terms(i);
        }
        total += quad(&block[..count]);
    }
    total
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Terms of both signs and many magnitudes, so that every order of addition rounds differently.
    fn term(i: usize) -> f32 {
        let bits = u32::try_from(i).unwrap().wrapping_mul(0x9E37_79B9);
        f32::from_bits((bits & 0x807F_FFFF) | (120 + bits % 13) << 23)
    }

    #[test]
    fn row_is_its_definition_to_the_bit() {
        for len in 0..1100 {
            let mut lanes = [0.0f32; LANES];
            for i in 0..len {
                lanes[i / RUN % LANES] += term(i);
            }
            for distance in [16, 8, 4, 2, 1] {
                let before = lanes;
                for (lane, value) in lanes.iter_mut().enumerate() {
                    *value = before[lane] + before[lane ^ distance];
                }
            }
            for lane in lanes {
                assert_eq!(row(len, term).to_bits(), lane.to_bits(), "{len} terms");
            }
        }
        assert_eq!(row(3, |_| -0.0).to_bits(), 0);
    }

    #[test]
    fn tokens_adds_blocks_of_128_from_their_first_term() {
        for len in [1, 127, 128, 129, 256, 300] {
            let block = |b: usize| (b * 128 + 1..len.min(b * 128 + 128)).fold(term(b * 128), |sum, i| sum + term(i));
            let blocks = (1..len.div_ceil(128)).fold(block(0), |sum, b| sum + block(b));
            assert_eq!(tokens(len, term).to_bits(), blocks.to_bits(), "{len} terms");
        }
        assert_eq!(tokens(0, term).to_bits(), 0);
        assert_eq!(tokens(2, |_| -0.0).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn the_lanes_of_a_quad_hold_pairs_of_columns() {
        // 2^24 absorbs a 1 that is added to it, so the order shows.
        let mut p = vec![0.0; 13];
        (p[0], p[1], p[8], p[2]) = (16_777_216.0, 1.0, 1.0, 1.0);
        assert_eq!(quad(&p), 16_777_216.0);
        p[4] = 2.0;
        assert_eq!(quad(&p), 16_777_218.0, "lane 2 joins after lanes 0 and 1");
        (p[0], p[11], p[12]) = (0.0, 5.0, 7.0);
        assert_eq!(quad(&p), 1.0 + 1.0 + 1.0 + 2.0 + 5.0 + 7.0);
    }

    #[test]
    fn quads_is_its_definition_to_the_bit() {
        for len in [0, 1, 7, 255, 256, 257, 300, 512, 1000] {
            let mut total = 0.0;
            for block in (0..len).step_by(256) {
                let lane = |t: usize| {
                    let columns = (block..len.min(block + 256)).filter(|c| c / 2 % 4 == t);
                    columns.fold(0.0, |sum, c| sum + term(c))
                };
                total += (lane(0) + lane(1)) + (lane(2) + lane(3));
            }
            assert_eq!(quads(len, term).to_bits(), total.to_bits(), "{len} terms");
        }
        assert_eq!(quads(3, |_| -0.0).to_bits(), 0);
    }

    #[test]
    fn max_finds_every_place_and_ignores_nan() {
        for place in 0..100 {
            let x: Vec<f32> = (0..100).map(|i| if i == place { 7.0 } else { [-1.0, f32::NAN][i % 2] }).collect();
            assert_eq!(max(&x), 7.0);
        }
        assert_eq!(max(&[]), f32::NEG_INFINITY);
    }

    #[test]
    fn tree_halves_its_range_and_skips_absent_leaves() {
        let leaf = |i: usize| Some(term(i));
        let want = (term(3) + term(4)) + (term(5) + (term(6) + term(7)));
        assert_eq!(tree(3, 8, &leaf).map(f32::to_bits), Some(want.to_bits()));
        assert_eq!(tree(0, 4, &|i| (i == 2).then_some(-0.0)).map(f32::to_bits), Some((-0.0f32).to_bits()));
        assert_eq!(tree(0, 4, &|_| None), None);
    }
}
