//! Attention, forward and backward.

#[cfg(test)]
mod properties;

use dropless_core::numerics::bf16;
use dropless_core::ops::{Attention, AttentionBackward, AttentionForward, AttentionShape};
use dropless_core::{DType, NumericModel};

use crate::differential::{Maker, Problem, Random};

/// Chance makes the problems of `any_shape`; those of the others are lists.
pub(crate) const PROBLEMS: [Problem; 20] = [
    under(NumericModel::Hopper, "attention_hopper", any_shape),
    under(NumericModel::F32, "attention_f32", any_shape),
    listed(NumericModel::Hopper, "attention_lengths_hopper", lengths_around_tiles_and_squares),
    listed(NumericModel::F32, "attention_lengths_f32", lengths_around_tiles_and_squares),
    listed(NumericModel::Hopper, "attention_head_sizes_hopper", head_sizes_that_fill_no_tile),
    listed(NumericModel::F32, "attention_head_sizes_f32", head_sizes_that_fill_no_tile),
    listed(NumericModel::Hopper, "attention_head_sizes_of_models_hopper", head_sizes_of_models),
    listed(NumericModel::Hopper, "attention_documents_hopper", packed_documents),
    listed(NumericModel::F32, "attention_documents_f32", packed_documents),
    listed(NumericModel::Hopper, "attention_shared_heads_hopper", query_heads_that_share_a_key_head),
    listed(NumericModel::F32, "attention_shared_heads_f32", query_heads_that_share_a_key_head),
    listed(NumericModel::Hopper, "attention_scores_hopper", scores_of_any_size),
    listed(NumericModel::F32, "attention_scores_f32", scores_of_any_size),
    listed(NumericModel::Hopper, "attention_no_tokens", no_tokens),
    listed(NumericModel::Hopper, "b255_rows_that_see_nothing", b255_rows_that_see_nothing),
    listed(NumericModel::Hopper, "attention_infinities_hopper", infinities_and_nan_that_all_see),
    listed(NumericModel::F32, "attention_infinities_f32", infinities_and_nan_that_all_see),
    listed(NumericModel::Hopper, "attention_unseen_hopper", infinities_and_nan_that_few_see),
    listed(NumericModel::F32, "attention_unseen_f32", infinities_and_nan_that_few_see),
    listed(NumericModel::Hopper, "attention_unseen_head_sizes_of_models_hopper", infinities_and_nan_in_heads_of_models),
];

const fn under(numerics: NumericModel, name: &'static str, run: fn(&mut Maker<'_>)) -> Problem {
    Problem { numerics, ..Problem::new(name, run) }
}

const fn listed(numerics: NumericModel, name: &'static str, run: fn(&mut Maker<'_>)) -> Problem {
    Problem { varied: false, ..under(numerics, name, run) }
}

/// Changes the values of q, k, v and d_out.
type Put = fn(&AttentionShape, &mut [Vec<f32>; 4]);

/// An attention. After its values are drawn, `put` changes them, and then so many elements, wherever they are, become
/// infinities or NaN.
#[derive(Clone, Debug)]
struct Case {
    shape: AttentionShape,
    start: Option<Vec<u32>>,
    put: Put,
    specials: usize,
}

const SPECIALS: [f32; 3] = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];

/// The first key of each row for documents of these lengths.
fn documents(lengths: &[usize]) -> Vec<u32> {
    let mut starts = Vec::new();
    for &length in lengths {
        starts.extend(vec![starts.len() as u32; length]);
    }
    starts
}

fn shape(batch: usize, sequence: usize, heads: [usize; 2], dims: [usize; 2]) -> AttentionShape {
    let scale = 1.0 / (dims[0] as f32).sqrt();
    AttentionShape { batch, sequence, heads: heads[0], kv_heads: heads[1], qk_dim: dims[0], v_dim: dims[1], scale }
}

/// A finite value, now and then so small that products with it underflow.
fn ordinary(random: &mut Random) -> f32 {
    let value = random.below(4001) as f32 / 1000.0 - 2.0;
    match random.below(40) {
        0 => 0.0,
        1 => -0.0,
        2 => value / 1024.0,
        3 => value * 2.0f32.powi(-130),
        _ => value,
    }
}

impl Case {
    fn new(shape: AttentionShape) -> Case {
        Case { shape, start: None, put: |_, _| {}, specials: 0 }
    }

    /// The same starts in each sequence.
    fn starts(self, starts: &[u32]) -> Case {
        assert_eq!(starts.len(), self.shape.sequence);
        Case { start: Some(starts.repeat(self.shape.batch)), ..self }
    }

    /// In every type that the model multiplies.
    fn run(&self, m: &mut Maker<'_>) {
        self.run_as(DType::Bf16, m);
        if m.numerics() == NumericModel::F32 {
            self.run_as(DType::F32, m);
        }
    }

    fn run_as(&self, dtype: DType, m: &mut Maker<'_>) {
        let shape = self.shape;
        let tokens = shape.batch * shape.sequence;
        let of_keys = shape.kv_heads * shape.qk_dim;
        let columns = [shape.heads * shape.qk_dim, of_keys, shape.kv_heads * shape.v_dim, shape.heads * shape.v_dim];
        let mut values =
            columns.map(|columns| (0..tokens * columns).map(|_| ordinary(&mut m.random)).collect::<Vec<_>>());
        (self.put)(&shape, &mut values);
        for _ in 0..self.specials {
            let operand = &mut values[m.random.below(4)];
            let at = m.random.below(operand.len());
            operand[at] = SPECIALS[m.random.below(3)];
        }
        let bytes = values.map(|values| match dtype {
            DType::F32 => bytemuck::cast_slice(&values).to_vec(),
            _ => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect::<Vec<u8>>(),
        });
        let [q, k, v, d_out] = [0, 1, 2, 3].map(|i| m.with_bytes(dtype, &[tokens, columns[i]], &bytes[i]));
        let (q, k, v, d_out) = (&q, &k, &v, &d_out);
        let start = self.start.as_ref().map(|start| m.integers(&[tokens], start));
        let start = start.as_ref();
        let out = &m.output("out", dtype, &[tokens, columns[3]]);
        let lse = &m.output("lse", DType::F32, &[tokens, shape.heads]);
        let [d_q, d_k, d_v] =
            [("d_q", 0), ("d_k", 1), ("d_v", 2)].map(|(name, i)| m.output(name, dtype, &[tokens, columns[i]]));
        let (d_q, d_k, d_v) = (&d_q, &d_k, &d_v);
        m.run(Attention::Forward(AttentionForward { q, k, v, start, out, lse, shape }), Attention::run);
        let backward = AttentionBackward { q, k, v, start, out, lse, d_out, d_q, d_k, d_v, shape };
        m.run(Attention::Backward(backward), Attention::run);
    }
}

fn lengths_around_tiles_and_squares(m: &mut Maker<'_>) {
    for sequence in [1, 15, 16, 17, 127, 128, 129, 300] {
        Case::new(shape(2, sequence, [2, 2], [16, 8])).run(m);
    }
}

fn head_sizes_that_fill_no_tile(m: &mut Maker<'_>) {
    for dims in [[1, 1], [8, 5], [20, 12], [33, 70]] {
        Case::new(shape(1, 50, [2, 1], dims)).run(m);
    }
}

/// Several blocks of rows, and query heads that share a key head: a tile of keys sees rows that it has no use for.
fn head_sizes_of_models(m: &mut Maker<'_>) {
    for dims in [[64, 64], [96, 96], [128, 128], [192, 128], [256, 128], [256, 256]] {
        Case::new(shape(1, 260, [2, 1], dims)).run(m);
        Case::new(shape(1, 260, [2, 1], dims)).starts(&documents(&[70, 120, 70])).run(m);
    }
}

fn packed_documents(m: &mut Maker<'_>) {
    for lengths in [&[1, 140, 3, 156][..], &[128, 128, 44], &[300]] {
        let starts = documents(lengths);
        Case::new(shape(2, 300, [2, 2], [8, 8])).starts(&starts).run(m);
    }
}

fn query_heads_that_share_a_key_head(m: &mut Maker<'_>) {
    for heads in [[4, 2], [6, 2], [3, 1], [4, 4]] {
        let starts = documents(&[100, 50]);
        Case::new(shape(2, 150, heads, [24, 40])).starts(&starts).run(m);
    }
}

/// Exponents on both sides of 2^24, beyond which their products and differences round apart, in neighbouring rows; scores
/// that overflow; and the largest and the smallest scale, of which the exponent's factor is infinite or subnormal.
fn scores_of_any_size(m: &mut Maker<'_>) {
    const POWERS: [i32; 9] = [0, 19, 20, 21, 22, 23, 40, 124, -124];
    let put: Put = |s, [q, ..]| {
        let rows = q.chunks_mut(s.heads * s.qk_dim).enumerate();
        rows.for_each(|(row, q)| q.iter_mut().for_each(|x| *x *= 2f32.powi(POWERS[row % POWERS.len()])));
    };
    let ordinary = shape(1, 150, [2, 1], [24, 16]);
    for scale in [ordinary.scale, f32::MAX, f32::from_bits(1)] {
        Case { put, ..Case::new(AttentionShape { scale, ..ordinary }) }.run(m);
    }
}

fn no_tokens(m: &mut Maker<'_>) {
    for (batch, sequence) in [(0, 7), (3, 0)] {
        Case::new(shape(batch, sequence, [2, 1], [8, 8])).run(m);
    }
}

fn b255_rows_that_see_nothing(m: &mut Maker<'_>) {
    let starts: Vec<u32> = (0..40).map(|row| if row % 3 == 0 { row + 1 + row * 90 } else { 0 }).collect();
    Case::new(shape(2, 40, [2, 1], [8, 8])).starts(&starts).run(m);
}

/// At the key that all rows see, and in the row that sees all keys, nothing can be skipped.
fn infinities_and_nan_that_all_see(m: &mut Maker<'_>) {
    let puts: [Put; 4] = [
        |_, [_, _, v, _]| (v[0], v[1], v[2]) = (f32::INFINITY, f32::NEG_INFINITY, f32::NAN),
        |_, [_, k, _, _]| k[0] = f32::NAN,
        |_, [_, k, _, _]| k[0] = f32::NEG_INFINITY,
        |s, [_, _, _, d_out]| *d_out.last_mut().unwrap() = if s.sequence > 100 { f32::NAN } else { f32::INFINITY },
    ];
    for put in puts {
        for sequence in [30, 140] {
            Case { put, ..Case::new(shape(1, sequence, [1, 1], [8, 8])) }.run(m);
        }
    }
}

/// Puts a value into the last element of one head of a token.
fn put(operand: &mut [f32], tokens: usize, heads: usize, [token, head]: [usize; 2], value: f32) {
    let dim = operand.len() / tokens / heads;
    operand[((token * heads) + head) * dim + dim - 1] = value;
}

/// Documents end within a tile and a block. What is not finite stands in the middle of one, and at both sides of the end
/// of a sequence; rows before it, the other documents, the next sequence and other heads do not see it.
fn infinities_and_nan_that_few_see(m: &mut Maker<'_>) {
    const SEQUENCE: usize = 200;
    const TOKENS: usize = 2 * SEQUENCE;
    let puts: [Put; 6] = [
        |s, [q, ..]| put(q, TOKENS, s.heads, [100, 1], f32::NAN),
        |s, [_, k, ..]| put(k, TOKENS, s.kv_heads, [100, 1], f32::NEG_INFINITY),
        |s, [_, _, v, _]| put(v, TOKENS, s.kv_heads, [100, 0], f32::INFINITY),
        |s, [.., d_out]| put(d_out, TOKENS, s.heads, [100, 2], f32::INFINITY),
        |s, [q, k, v, d_out]| {
            put(q, TOKENS, s.heads, [SEQUENCE, 0], f32::INFINITY);
            put(k, TOKENS, s.kv_heads, [SEQUENCE - 1, 0], f32::NAN);
            put(v, TOKENS, s.kv_heads, [SEQUENCE - 1, 1], f32::NAN);
            put(d_out, TOKENS, s.heads, [SEQUENCE, 3], f32::NAN);
        },
        |s, [_, k, v, _]| {
            put(k, TOKENS, s.kv_heads, [SEQUENCE, 0], f32::INFINITY);
            put(v, TOKENS, s.kv_heads, [SEQUENCE, 0], f32::NEG_INFINITY);
        },
    ];
    for put in puts {
        let case = Case { put, ..Case::new(shape(2, SEQUENCE, [4, 2], [24, 40])) };
        case.starts(&documents(&[70, 75, 55])).run(m);
    }
}

/// The last key of a document and the first row of the next, in the tile of both and in two blocks of rows.
fn infinities_and_nan_in_heads_of_models(m: &mut Maker<'_>) {
    const TOKENS: usize = 260;
    let puts: [Put; 2] = [
        |s, [q, _, v, _]| {
            put(q, TOKENS, s.heads, [190, 1], f32::INFINITY);
            put(v, TOKENS, s.kv_heads, [189, 0], f32::INFINITY);
        },
        |s, [_, k, _, d_out]| {
            put(k, TOKENS, s.kv_heads, [189, 0], f32::NAN);
            put(d_out, TOKENS, s.heads, [190, 0], f32::NAN);
        },
    ];
    for (put, dims) in puts.into_iter().flat_map(|put| [[64, 64], [192, 128], [256, 256]].map(|dims| (put, dims))) {
        let case = Case { put, ..Case::new(shape(1, TOKENS, [2, 1], dims)) };
        case.starts(&documents(&[70, 120, 70])).run(m);
    }
}

fn any_shape(m: &mut Maker<'_>) {
    let (batch, sequence) = (1 + m.below(3), 1 + m.below(160));
    let (kv_heads, group) = (1 + m.below(3), 1 + m.below(3));
    let dims = [0; 2].map(|_| 1 + m.below(40));
    let specials = m.below(4);
    let case = Case { specials, ..Case::new(shape(batch, sequence, [kv_heads * group, kv_heads], dims)) };
    // Any key up to the row's own, which is more than packing makes.
    let starts: Vec<u32> = (0..sequence).map(|row| m.random.below(row + 1) as u32).collect();
    if m.flag() { case.starts(&starts).run(m) } else { case.run(m) }
}
