//! Attention, forward and backward, against the host, bit by bit. Every result lies between elements that must not
//! change.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "tests may panic, and their numbers are small"
)]

mod support;

use std::sync::LazyLock;

use dropless_core::host::Host;
use dropless_core::numerics::bf16;
use dropless_core::ops::{Attention, AttentionBackward, AttentionForward, AttentionShape};
use dropless_core::{Backend, DType, NumericModel, Tensor};
use dropless_wgpu::Wgpu;
use support::{Maker, Random, assert_same, cases, host, open};

/// The element types under each model that can multiply them.
const ARITHMETIC: [(DType, NumericModel); 3] =
    [(DType::F32, NumericModel::F32), (DType::Bf16, NumericModel::F32), (DType::Bf16, NumericModel::Hopper)];

/// The results.
const NAMES: [&str; 5] = ["out", "lse", "d_q", "d_k", "d_v"];

/// Changes the values of q, k, v and d_out.
type Put = fn(&AttentionShape, &mut [Vec<f32>; 4]);

/// An attention; `put` has the last word on its values.
#[derive(Clone, Debug)]
struct Problem {
    shape: AttentionShape,
    dtype: DType,
    start: Option<Vec<u32>>,
    put: Put,
}

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

/// A finite value: what a row does not see must not be infinite or NaN, as there the order of skipping shows. And of
/// such a size that no product of a chain underflows, as then the sign of zero tells what was skipped.
fn ordinary(random: &mut Random) -> f32 {
    let value = random.below(4001) as f32 / 1000.0 - 2.0;
    match random.below(40) {
        0 => 0.0,
        1 => -0.0,
        2 => value / 1024.0,
        _ => value,
    }
}

impl Problem {
    fn new(dtype: DType, shape: AttentionShape) -> Problem {
        Problem { shape, dtype, start: None, put: |_, _| {} }
    }

    /// The same starts in each sequence.
    fn starts(self, starts: &[u32]) -> Problem {
        assert_eq!(starts.len(), self.shape.sequence);
        Problem { start: Some(starts.repeat(self.shape.batch)), ..self }
    }

    /// The results in the order of [`NAMES`], each with the elements around it.
    fn run(&self, m: &mut Maker<'_>) -> [Tensor; 5] {
        let s = self.shape;
        let tokens = s.batch * s.sequence;
        let columns = [s.heads * s.qk_dim, s.kv_heads * s.qk_dim, s.kv_heads * s.v_dim, s.heads * s.v_dim];
        let mut values =
            columns.map(|columns| (0..tokens * columns).map(|_| ordinary(&mut m.random)).collect::<Vec<_>>());
        (self.put)(&s, &mut values);
        let bytes = values.map(|values| match self.dtype {
            DType::F32 => bytemuck::cast_slice(&values).to_vec(),
            _ => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect::<Vec<u8>>(),
        });
        let mut places = (0..4).map(|i| m.with_bytes(self.dtype, &[tokens, columns[i]], &bytes[i]));
        let [q, k, v, d_out] = [0; 4].map(|_| places.next().unwrap());
        let start = self.start.as_ref().map(|start| m.integers(&[tokens], start));
        let mut wholes = Vec::new();
        let mut result = |dtype: DType, columns: usize| {
            let (len, before) = (tokens * columns, m.random.below(9));
            let whole = m.tensor(dtype, &[before + len + 5]);
            let view = whole.slice(before, before + len).unwrap().reshape(&[tokens, columns]).unwrap();
            wholes.push(whole);
            view
        };
        let (out, lse) = (result(self.dtype, columns[3]), result(DType::F32, s.heads));
        let [d_q, d_k, d_v] = [0, 1, 2].map(|i| result(self.dtype, columns[i]));
        let (q, k, v, out, lse, start, shape) = (&q, &k, &v, &out, &lse, start.as_ref(), s);
        let (d_out, d_q, d_k, d_v) = (&d_out, &d_q, &d_k, &d_v);
        Attention::Forward(AttentionForward { q, k, v, start, out, lse, shape }).run(m.backend).unwrap();
        Attention::Backward(AttentionBackward { q, k, v, start, out, lse, d_out, d_q, d_k, d_v, shape })
            .run(m.backend)
            .unwrap();
        wholes.try_into().unwrap()
    }
}

/// Both backends under one model. The tests share them, and so each shader is compiled once.
struct Pair {
    wgpu: Wgpu,
    host: Host,
}

static F32: LazyLock<Option<Pair>> = LazyLock::new(|| pair(NumericModel::F32));
static HOPPER: LazyLock<Option<Pair>> = LazyLock::new(|| pair(NumericModel::Hopper));

fn pair(numerics: NumericModel) -> Option<Pair> {
    Some(Pair { wgpu: open(numerics)?, host: host(numerics) })
}

/// Runs a problem in every arithmetic on both backends.
fn check(seed: u64, problem: impl Fn(DType) -> Problem) {
    for (dtype, numerics) in ARITHMETIC {
        let pair = if numerics == NumericModel::F32 { &F32 } else { &HOPPER };
        let Some(Pair { wgpu, host }) = &**pair else { return };
        let problem = problem(dtype);
        let run = |backend: &dyn Backend| {
            let results = problem.run(&mut Maker { backend, random: Random(seed) });
            results.map(|result| (result.dtype(), backend.download::<u8>(&result).unwrap()))
        };
        for ((name, (dtype, got)), (_, want)) in NAMES.iter().zip(run(wgpu)).zip(run(host)) {
            let Problem { shape, start, .. } = &problem;
            assert_same(&format!("{name} under {numerics:?}, {shape:?}, {start:?}"), dtype, &got, &want);
        }
    }
}

#[test]
fn lengths_around_tiles_and_squares() {
    for sequence in [1, 15, 16, 17, 127, 128, 129, 300] {
        check(1, |dtype| Problem::new(dtype, shape(2, sequence, [2, 2], [16, 8])));
    }
}

#[test]
fn head_sizes_that_fill_no_tile() {
    for dims in [[1, 1], [8, 5], [20, 12], [33, 70]] {
        check(1, |dtype| Problem::new(dtype, shape(1, 50, [2, 1], dims)));
    }
}

#[test]
fn packed_documents() {
    for lengths in [&[1, 140, 3, 156][..], &[128, 128, 44], &[300]] {
        let starts = documents(lengths);
        check(1, |dtype| Problem::new(dtype, shape(2, 300, [2, 2], [8, 8])).starts(&starts));
    }
}

#[test]
fn query_heads_that_share_a_key_head() {
    for heads in [[4, 2], [6, 2], [3, 1], [4, 4]] {
        let starts = documents(&[100, 50]);
        check(1, |dtype| Problem::new(dtype, shape(2, 150, heads, [24, 40])).starts(&starts));
    }
}

#[test]
fn no_tokens() {
    for (batch, sequence) in [(0, 7), (3, 0)] {
        check(1, |dtype| Problem::new(dtype, shape(batch, sequence, [2, 1], [8, 8])));
    }
}

#[test]
fn b255_rows_that_see_nothing() {
    let starts: Vec<u32> = (0..40).map(|row| if row % 3 == 0 { row + 1 + row * 90 } else { 0 }).collect();
    check(1, |dtype| Problem::new(dtype, shape(2, 40, [2, 1], [8, 8])).starts(&starts));
}

/// At the key that all rows see, and in the row that sees all keys, nothing can be skipped.
#[test]
fn infinities_and_nan_that_all_see() {
    let puts: [Put; 4] = [
        |_, [_, _, v, _]| (v[0], v[1], v[2]) = (f32::INFINITY, f32::NEG_INFINITY, f32::NAN),
        |_, [_, k, _, _]| k[0] = f32::NAN,
        |_, [_, k, _, _]| k[0] = f32::NEG_INFINITY,
        |s, [_, _, _, d_out]| *d_out.last_mut().unwrap() = if s.sequence > 100 { f32::NAN } else { f32::INFINITY },
    ];
    for put in puts {
        for sequence in [30, 140] {
            check(1, |dtype| Problem { put, ..Problem::new(dtype, shape(1, sequence, [1, 1], [8, 8])) });
        }
    }
}

#[test]
fn any_shape() {
    for seed in 0..u64::from(cases()) {
        let random = &mut Random(seed);
        let (batch, sequence) = (1 + random.below(3), 1 + random.below(160));
        let (kv_heads, group) = (1 + random.below(3), 1 + random.below(3));
        let dims = [0; 2].map(|_| 1 + random.below(40));
        // Any key up to the row's own, which is more than packing makes.
        let starts: Vec<u32> = (0..sequence).map(|row| random.below(row + 1) as u32).collect();
        let packed = random.below(2) == 0;
        check(seed, |dtype| {
            let problem = Problem::new(dtype, shape(batch, sequence, [kv_heads * group, kv_heads], dims));
            if packed { problem.starts(&starts) } else { problem }
        });
    }
}
