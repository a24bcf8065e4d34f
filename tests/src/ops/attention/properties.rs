//! Attention: bits against a naive reading of the rule, errors against f64, and what must not change a bit.

use std::f64::consts::LOG2_E;

use dropless_core::host::{Host, HostOptions, Simd};
use dropless_core::numerics::special::ex2;
use dropless_core::numerics::{NumericModel, bf16, math, mma, reduce};
use dropless_core::ops::{Attention, AttentionBackward, AttentionForward, AttentionShape};
use dropless_core::{Backend, DType, Memory, Result, Tensor};
use proptest::prelude::*;

/// An attention with its operands; row-major `[tokens, heads * dim]`, all exact in bf16.
#[derive(Clone, Debug)]
struct Problem {
    shape: AttentionShape,
    dtype: DType,
    start: Option<Vec<u32>>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_out: Vec<f32>,
}

/// Every result, widened to f32.
#[derive(Clone, Debug)]
struct Results {
    out: Vec<f32>,
    lse: Vec<f32>,
    d_q: Vec<f32>,
    d_k: Vec<f32>,
    d_v: Vec<f32>,
}

impl Results {
    fn named(&self) -> [(&'static str, &[f32]); 5] {
        [("out", &self.out), ("lse", &self.lse), ("d_q", &self.d_q), ("d_k", &self.d_k), ("d_v", &self.d_v)]
    }
}

/// Compares bits, where any NaN is any other's equal, and names the first that differs.
fn assert_bits(found: &Results, expected: &Results, what: &str) {
    for ((name, found), (_, expected)) in found.named().into_iter().zip(expected.named()) {
        assert_eq!(found.len(), expected.len(), "{name}");
        let differs = |i: &usize| {
            let (f, e) = (found[*i], expected[*i]);
            f.to_bits() != e.to_bits() && !(f.is_nan() && e.is_nan())
        };
        let all: Vec<usize> = (0..found.len()).filter(differs).collect();
        if let Some(&i) = all.first() {
            let (f, e) = (found[i], expected[i]);
            panic!("{what}: {} of {} of {name} differ, first at {i}: {f:e} is not {e:e}", all.len(), found.len());
        }
    }
}

/// Numbers between -2 and 2 that are exact in bf16.
fn numbers(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::round((state >> 8) as f32 / (1 << 22) as f32 - 2.0)
    };
    std::iter::repeat_with(next).take(len).collect()
}

impl Problem {
    fn new(shape: AttentionShape, dtype: DType, seed: u32) -> Self {
        let tokens = shape.batch * shape.sequence;
        Problem {
            shape,
            dtype,
            start: None,
            q: numbers(seed, tokens * shape.heads * shape.qk_dim),
            k: numbers(seed + 1, tokens * shape.kv_heads * shape.qk_dim),
            v: numbers(seed + 2, tokens * shape.kv_heads * shape.v_dim),
            d_out: numbers(seed + 3, tokens * shape.heads * shape.v_dim),
        }
    }

    /// Documents of these lengths in every sequence.
    fn packed(mut self, lengths: &[usize]) -> Self {
        let mut starts = Vec::new();
        for &length in lengths {
            starts.extend(vec![u32::try_from(starts.len()).unwrap(); length]);
        }
        assert_eq!(starts.len(), self.shape.sequence);
        self.start = Some(starts.repeat(self.shape.batch));
        self
    }

    fn start(&self, token: usize) -> usize {
        self.start.as_ref().map_or(0, |start| start[token] as usize)
    }

    fn upload(&self, backend: &dyn Backend, values: &[f32], cols: usize) -> Result<Tensor> {
        let shape = [self.shape.batch * self.shape.sequence, cols];
        match self.dtype {
            DType::F32 => backend.upload(DType::F32, &shape, values),
            _ => backend.upload(DType::Bf16, &shape, &values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<u16>>()),
        }
    }

    fn try_run(&self, backend: &dyn Backend) -> Result<Results> {
        let s = self.shape;
        let tokens = s.batch * s.sequence;
        let (q, k) =
            (self.upload(backend, &self.q, s.heads * s.qk_dim)?, self.upload(backend, &self.k, s.kv_heads * s.qk_dim)?);
        let (v, d_out) = (
            self.upload(backend, &self.v, s.kv_heads * s.v_dim)?,
            self.upload(backend, &self.d_out, s.heads * s.v_dim)?,
        );
        let start = self.start.as_ref().map(|start| backend.upload(DType::U32, &[tokens], start)).transpose()?;
        let like = |t: &Tensor| backend.alloc(t.dtype(), t.shape(), Memory::Device);
        let (out, d_q, d_k, d_v) = (like(&d_out)?, like(&q)?, like(&k)?, like(&v)?);
        let lse = backend.alloc(DType::F32, &[tokens, s.heads], Memory::Device)?;
        let start = start.as_ref();
        let forward = AttentionForward { q: &q, k: &k, v: &v, start, out: &out, lse: &lse, shape: s };
        Attention::Forward(forward).run(backend)?;
        Attention::Backward(AttentionBackward {
            q: &q,
            k: &k,
            v: &v,
            start,
            out: &out,
            lse: &lse,
            d_out: &d_out,
            d_q: &d_q,
            d_k: &d_k,
            d_v: &d_v,
            shape: s,
        })
        .run(backend)?;
        let read = |t: &Tensor| -> Result<Vec<f32>> {
            match t.dtype() {
                DType::F32 => backend.download(t),
                _ => Ok(backend.download::<u16>(t)?.into_iter().map(bf16::to_f32).collect()),
            }
        };
        Ok(Results { out: read(&out)?, lse: read(&lse)?, d_q: read(&d_q)?, d_k: read(&d_k)?, d_v: read(&d_v)? })
    }

    fn run(&self, numerics: NumericModel) -> Results {
        self.try_run(&Host::new(HostOptions { numerics, ..HostOptions::default() }).unwrap()).unwrap()
    }

    /// Element i of a head's row of a tensor with `heads` heads of `dim` elements.
    fn row<'a>(&self, x: &'a [f32], token: usize, head: usize, heads: usize, dim: usize) -> &'a [f32] {
        &x[(token * heads + head) * dim..][..dim]
    }

    fn q(&self, token: usize, head: usize) -> &[f32] {
        self.row(&self.q, token, head, self.shape.heads, self.shape.qk_dim)
    }

    fn k(&self, token: usize, head: usize) -> &[f32] {
        self.row(&self.k, token, self.kv(head), self.shape.kv_heads, self.shape.qk_dim)
    }

    fn v(&self, token: usize, head: usize) -> &[f32] {
        self.row(&self.v, token, self.kv(head), self.shape.kv_heads, self.shape.v_dim)
    }

    fn d_out(&self, token: usize, head: usize) -> &[f32] {
        self.row(&self.d_out, token, head, self.shape.heads, self.shape.v_dim)
    }

    fn kv(&self, head: usize) -> usize {
        head * self.shape.kv_heads / self.shape.heads
    }

    /// A chain of this problem's operands.
    fn chain(&self, model: NumericModel, a: &[f32], b: &[f32], acc: f32) -> f32 {
        let codes = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<u16>>();
        match self.dtype {
            DType::F32 => mma::dot_f32(a, b, acc),
            _ => mma::dot_bf16(model, &codes(a), &codes(b), acc),
        }
    }

    fn round(&self, x: f32) -> f32 {
        if self.dtype == DType::F32 { x } else { bf16::round(x) }
    }

    /// The rule, read literally: row by row, whole tiles; what a row does not see is replaced by zeros.
    fn naive(&self, model: NumericModel) -> Results {
        let s = self.shape;
        let tokens = s.batch * s.sequence;
        let mut r = Results {
            out: vec![0.0; tokens * s.heads * s.v_dim],
            lse: vec![0.0; tokens * s.heads],
            d_q: vec![0.0; self.q.len()],
            d_k: vec![0.0; self.k.len()],
            d_v: vec![0.0; self.v.len()],
        };
        for batch in 0..s.batch {
            for head in 0..s.heads {
                for row in 0..s.sequence {
                    self.naive_row(model, batch, head, row, &mut r);
                }
            }
        }
        for batch in 0..s.batch {
            for kv_head in 0..s.kv_heads {
                self.naive_gradients(model, batch, kv_head, &mut r);
            }
        }
        r
    }

    fn naive_row(&self, model: NumericModel, batch: usize, head: usize, row: usize, r: &mut Results) {
        let s = self.shape;
        let token = batch * s.sequence + row;
        let c = s.scale * math::LOG2_E;
        let (mut m, mut l, mut o) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; s.v_dim]);
        for tile in (0..s.sequence).step_by(128) {
            let end = s.sequence.min(tile + 128);
            let seen: Vec<usize> = (tile..end).filter(|&key| self.start(token) <= key && key <= row).collect();
            if seen.is_empty() {
                continue;
            }
            let score = |key: usize| {
                let k = self.k(batch * s.sequence + key, head);
                self.chain(model, self.q(token, head), k, 0.0)
            };
            let mut p = [0.0f32; 128];
            for &key in &seen {
                p[key - tile] = score(key);
            }
            let largest = seen.iter().map(|&key| p[key - tile]).fold(f32::NEG_INFINITY, f32::max);
            let m_new = m.max(largest * c);
            let alpha = if m == f32::NEG_INFINITY { 0.0 } else { ex2(m - m_new) };
            for &key in &seen {
                p[key - tile] = ex2(exponent(p[key - tile], c, m_new));
            }
            let mut lanes = [0.0f32; 4];
            for (c, p) in p.iter().enumerate() {
                lanes[c / 2 % 4] += p;
            }
            l = l * alpha + ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]));
            let p = p.map(|p| self.round(p));
            for (i, o) in o.iter_mut().enumerate() {
                let mut v = [0.0; 128];
                for &key in &seen {
                    v[key - tile] = self.v(batch * s.sequence + key, head)[i];
                }
                *o = self.chain(model, &p, &v, *o * alpha);
            }
            m = m_new;
        }
        let reciprocal = if m == f32::NEG_INFINITY { 0.0 } else { 1.0 / l };
        for (i, o) in o.into_iter().enumerate() {
            r.out[(token * s.heads + head) * s.v_dim + i] = self.round((o + 0.0) * reciprocal);
        }
        r.lse[token * s.heads + head] = math::log(l).mul_add(math::LOG2_E, m);
    }

    fn naive_gradients(&self, model: NumericModel, batch: usize, kv_head: usize, r: &mut Results) {
        let s = self.shape;
        let heads: Vec<usize> = (0..s.heads).filter(|&head| self.kv(head) == kv_head).collect();
        let (n, first) = (s.sequence, batch * s.sequence);
        let sees = |row: usize, key: usize| self.start(first + row) <= key && key <= row;
        let mut d_k = vec![0.0f32; n * s.qk_dim];
        let mut d_v = vec![0.0f32; n * s.v_dim];
        for head in heads {
            // p and ds: [row, key].
            let (mut p, mut ds) = (vec![0.0f32; n * n], vec![0.0f32; n * n]);
            for row in 0..n {
                let token = first + row;
                let out = self.row(&r.out, token, head, s.heads, s.v_dim);
                let d_out = self.d_out(token, head);
                let delta = reduce::row(s.v_dim, |i| d_out[i] * out[i]);
                for key in self.start(token)..row + 1 {
                    let score = self.chain(model, self.q(token, head), self.k(first + key, head), 0.0);
                    let p_exact = ex2(exponent(score, s.scale * math::LOG2_E, r.lse[token * s.heads + head]));
                    let dp = self.chain(model, d_out, self.v(first + key, head), 0.0);
                    p[row * n + key] = self.round(p_exact);
                    ds[row * n + key] = self.round(p_exact * (dp - delta));
                }
                let q = (token * s.heads + head) * s.qk_dim;
                for i in 0..s.qk_dim {
                    let of = |key: usize| if sees(row, key) { self.k(first + key, head)[i] } else { 0.0 };
                    let k: Vec<f32> = (0..n).map(of).collect();
                    let chain = self.chain(model, &ds[row * n..][..n], &k, 0.0);
                    r.d_q[q + i] = self.round((chain + 0.0) * s.scale);
                }
            }
            let column = |x: &[f32], key: usize| (0..n).map(|row| x[row * n + key]).collect::<Vec<f32>>();
            for key in 0..n {
                let (p, ds) = (column(&p, key), column(&ds, key));
                for i in 0..s.v_dim {
                    let of = |row: usize| if sees(row, key) { self.d_out(first + row, head)[i] } else { 0.0 };
                    let d_out: Vec<f32> = (0..n).map(of).collect();
                    let acc = &mut d_v[key * s.v_dim + i];
                    *acc = self.chain(model, &p, &d_out, *acc);
                }
                for i in 0..s.qk_dim {
                    let of = |row: usize| if sees(row, key) { self.q(first + row, head)[i] } else { 0.0 };
                    let q: Vec<f32> = (0..n).map(of).collect();
                    let acc = &mut d_k[key * s.qk_dim + i];
                    *acc = self.chain(model, &ds, &q, *acc);
                }
            }
        }
        for key in 0..n {
            let at = (first + key) * s.kv_heads + kv_head;
            for i in 0..s.v_dim {
                r.d_v[at * s.v_dim + i] = self.round(d_v[key * s.v_dim + i] + 0.0);
            }
            for i in 0..s.qk_dim {
                r.d_k[at * s.qk_dim + i] = self.round((d_k[key * s.qk_dim + i] + 0.0) * s.scale);
            }
        }
    }
}

fn shape(batch: usize, sequence: usize, heads: usize, kv_heads: usize, qk_dim: usize, v_dim: usize) -> AttentionShape {
    AttentionShape { batch, sequence, heads, kv_heads, qk_dim, v_dim, scale: 1.0 / (qk_dim as f32).sqrt() }
}

/// The element types under each model that can multiply them.
const ARITHMETIC: [(DType, NumericModel); 3] =
    [(DType::F32, NumericModel::F32), (DType::Bf16, NumericModel::F32), (DType::Bf16, NumericModel::Hopper)];

#[test]
fn bits_are_those_of_the_rule() {
    for (dtype, model) in ARITHMETIC {
        for (seed, sequence) in (1u32..).zip([1, 127, 128, 129]) {
            let problem = Problem::new(shape(1, sequence, 2, 1, 8, 5), dtype, 10 * seed);
            assert_bits(&problem.run(model), &problem.naive(model), &format!("{dtype:?} {model:?} {sequence}"));
        }
    }
}

#[test]
fn bits_are_those_of_the_rule_over_three_tiles_and_documents() {
    for (dtype, model) in ARITHMETIC {
        let problem = Problem::new(shape(1, 300, 1, 1, 20, 12), dtype, 77);
        assert_bits(&problem.run(model), &problem.naive(model), &format!("{dtype:?} {model:?}"));
        let problem = Problem::new(shape(1, 300, 1, 1, 6, 4), dtype, 78).packed(&[1, 140, 3, 156]);
        assert_bits(&problem.run(model), &problem.naive(model), &format!("packed {dtype:?} {model:?}"));
    }
}

/// Where every score is 0, p of row r is 1 / (r + 1). The terms of two rows cancel, the small terms between them are cut
/// step by step, and what is left of them shows in bf16 where each step began.
#[test]
fn steps_begin_anew_at_each_heads_first_row() {
    let mut problem = Problem::new(shape(1, 150, 2, 1, 2, 4), DType::Bf16, 85);
    problem.q.fill(0.0);
    for (i, d) in problem.d_out.iter_mut().enumerate() {
        let (row, head) = (i / 8, i / 4 % 2);
        *d = match (head, row) {
            (0, 63) => 64.0,
            (1, 127) => -128.0,
            _ => bf16::round(*d * (row + 1) as f32 / (1 << 24) as f32),
        };
    }
    let results = problem.run(NumericModel::Hopper);
    assert_bits(&results, &problem.naive(NumericModel::Hopper), "cancelling rows");
    let exact = &problem.wide()[4].value;
    let cut = results.d_v.iter().zip(exact).filter(|&(&d, e)| (f64::from(d) - e).abs() > 0.02 * e.abs()).count();
    assert!(cut > 0, "nothing was cut, so nothing was tested");
}

#[test]
fn bits_do_not_depend_on_threads_or_instructions() {
    for (dtype, numerics) in ARITHMETIC {
        let problem = Problem::new(shape(2, 150, 4, 2, 24, 40), dtype, 5).packed(&[100, 50]);
        let options = |threads, simd| HostOptions { numerics, threads, simd: Some(simd), ..HostOptions::default() };
        let on = |threads, simd| problem.try_run(&Host::new(options(threads, simd)).unwrap()).unwrap();
        let expected = on(1, Simd::Plain);
        for simd in Simd::ALL.into_iter().filter(|simd| simd.available()) {
            for threads in [1, 3] {
                assert_bits(&on(threads, simd), &expected, &format!("{dtype:?} {numerics:?} {simd:?} {threads}"));
            }
        }
    }
}

#[test]
fn sequences_of_a_batch_do_not_touch_each_other() {
    let both = Problem::new(shape(2, 70, 2, 1, 8, 8), DType::Bf16, 31);
    let results = both.run(NumericModel::Hopper);
    for batch in 0..2 {
        let half = |x: &[f32]| x[batch * x.len() / 2..(batch + 1) * x.len() / 2].to_vec();
        let alone = Problem {
            shape: AttentionShape { batch: 1, ..both.shape },
            q: half(&both.q),
            k: half(&both.k),
            v: half(&both.v),
            d_out: half(&both.d_out),
            ..both.clone()
        };
        let part = Results {
            out: half(&results.out),
            lse: half(&results.lse),
            d_q: half(&results.d_q),
            d_k: half(&results.d_k),
            d_v: half(&results.d_v),
        };
        assert_bits(&part, &alone.run(NumericModel::Hopper), "a sequence of two");
    }
}

#[test]
fn query_heads_share_the_key_head_of_their_index() {
    let grouped = Problem::new(shape(1, 40, 4, 2, 8, 8), DType::Bf16, 41);
    let repeat = |x: &[f32]| x.chunks(16).flat_map(|t| [&t[..8], &t[..8], &t[8..], &t[8..]].concat()).collect();
    let (k, v) = (repeat(&grouped.k), repeat(&grouped.v));
    let repeated = Problem { shape: AttentionShape { kv_heads: 4, ..grouped.shape }, k, v, ..grouped.clone() };
    let (grouped, repeated) = (grouped.run(NumericModel::Hopper), repeated.run(NumericModel::Hopper));
    assert_eq!((grouped.out, grouped.lse, grouped.d_q), (repeated.out, repeated.lse, repeated.d_q));
}

#[test]
fn a_later_token_changes_no_earlier_row() {
    let problem = Problem::new(shape(1, 140, 1, 1, 8, 8), DType::Bf16, 51);
    let mut changed = problem.clone();
    for x in [&mut changed.k, &mut changed.v] {
        x[100 * 8..].copy_from_slice(&numbers(52, 40 * 8));
    }
    let (a, b) = (problem.run(NumericModel::Hopper), changed.run(NumericModel::Hopper));
    assert_eq!((&a.out[..800], &a.lse[..100], &a.d_q[..800]), (&b.out[..800], &b.lse[..100], &b.d_q[..800]));
    assert_ne!(a.out[800..], b.out[800..]);
}

#[test]
fn b243_packed_documents_do_not_see_each_other() {
    // [A A A][B B]
    let problem = Problem::new(shape(1, 5, 1, 1, 4, 4), DType::F32, 61).packed(&[3, 2]);
    let mut changed = problem.clone();
    for x in [&mut changed.q, &mut changed.k, &mut changed.v, &mut changed.d_out] {
        x[..12].copy_from_slice(&numbers(62, 12));
    }
    let (a, b) = (problem.run(NumericModel::F32), changed.run(NumericModel::F32));
    assert_eq!((&a.out[12..], &a.d_q[12..], &a.d_k[12..]), (&b.out[12..], &b.d_q[12..], &b.d_k[12..]));
    assert_eq!(a.out[12..16], problem.v[12..16], "the first token of B sees only itself");
    assert_ne!(a.out[..12], b.out[..12]);
}

/// Values that are not finite, in each operand, for some element of one token.
fn not_finite(problem: &Problem, token: usize) -> Vec<(String, Problem)> {
    type Operand = fn(&mut Problem) -> &mut Vec<f32>;
    let operands: [(&str, Operand); 4] =
        [("q", |p| &mut p.q), ("k", |p| &mut p.k), ("v", |p| &mut p.v), ("d_out", |p| &mut p.d_out)];
    let mut all = Vec::new();
    for ((name, operand), value) in operands.into_iter().flat_map(|o| [f32::INFINITY, f32::NAN].map(|x| (o, x))) {
        let mut changed = problem.clone();
        let values = operand(&mut changed);
        let columns = values.len() / (problem.shape.batch * problem.shape.sequence);
        values[token * columns + 1] = value;
        all.push((format!("{value} in {name} of token {token}"), changed));
    }
    all
}

#[test]
fn what_is_not_seen_never_enters() {
    for (dtype, model) in ARITHMETIC {
        // A document ends within a step, a block and a tile; two query heads share a key head, two others do not.
        let problem = Problem::new(shape(2, 150, 4, 2, 6, 5), dtype, 65).packed(&[70, 80]);
        let expected = problem.run(model);
        for token in [0, 69, 70, 100, 149, 150] {
            for (what, changed) in not_finite(&problem, token) {
                let found = changed.run(model);
                assert_bits(&found, &changed.naive(model), &what);
                // The other documents, and the heads that did not get the value.
                let document = |t: usize| (t / 150, t % 150 / 70 > 0);
                let each = found.named().into_iter().zip(expected.named());
                for ((name, found), (_, expected)) in each {
                    let columns = found.len() / 300;
                    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
                        let stranger = document(i / columns) != document(token) || i % columns >= columns / 2;
                        assert!(!stranger || f.to_bits() == e.to_bits(), "{what}: {name}[{i}] is {f:e}, not {e:e}");
                    }
                }
            }
        }
    }
}

/// Row r of token t: what it sees is not finite.
#[test]
fn what_is_not_finite_shows_in_the_rows_that_see_it() {
    for (dtype, model) in ARITHMETIC {
        let problem = Problem::new(shape(1, 150, 1, 1, 6, 5), dtype, 66).packed(&[70, 80]);
        for token in [3, 75, 140] {
            for (what, changed) in not_finite(&problem, token) {
                let found = changed.run(model);
                let end = if token < 70 { 70 } else { 150 };
                let own = what.contains(" q ") || what.contains(" d_out ");
                for row in token..if own { token + 1 } else { end } {
                    let forward = found.out[row * 5..][..5].iter().chain(&found.lse[row..row + 1]);
                    let backward = &found.d_q[row * 6..][..6];
                    let shows = forward.chain(backward).any(|x| !x.is_finite());
                    assert!(shows, "{dtype:?} {model:?} {what}: row {row}");
                }
            }
        }
    }
}

/// Where all terms underflow, the sign of their sum would tell which terms came last.
#[test]
fn a_chain_that_ends_in_zero_ends_in_plus_zero() {
    let tiny = 2.0f32.powi(-100);
    for (dtype, model) in ARITHMETIC {
        let mut problem = Problem::new(shape(1, 40, 1, 1, 4, 3), dtype, 67);
        problem.d_out.iter_mut().for_each(|x| *x *= tiny);
        problem.k.fill(-tiny);
        let found = problem.run(model);
        assert_bits(&found, &problem.naive(model), &format!("{dtype:?} {model:?}"));
        assert!(found.d_q.iter().all(|x| x.to_bits() == 0), "{dtype:?} {model:?}: {:?}", found.d_q);
    }
}

#[test]
fn b255_a_row_that_sees_nothing_is_zero() {
    let mut problem = Problem::new(shape(1, 4, 1, 1, 1, 2), DType::F32, 71);
    problem.start = Some(vec![1, 0, 3, 0]);
    let results = problem.run(NumericModel::F32);
    assert_eq!(results.out[..2], [0.0; 2]);
    assert_eq!((results.lse[0], results.lse[2]), (f32::NEG_INFINITY, f32::NEG_INFINITY));
    assert_eq!((results.d_q[0], results.d_q[2]), (0.0, 0.0));
    for (name, values) in results.named() {
        assert!(values.iter().all(|x| x.is_finite() || name == "lse"), "{name} {values:?}");
    }
    assert_bits(&results, &problem.naive(NumericModel::F32), "rows that see nothing");
}

#[test]
fn b255_large_scores_do_not_overflow() {
    for (keys, expected) in [([-1e30, -1e30], [0.5, 0.5]), ([1000.0, 999.0], [0.731_058_6, 0.268_941_4])] {
        let shape = AttentionShape { scale: 1.0, ..shape(1, 2, 1, 1, 1, 2) };
        let (q, v, d_out) = (vec![1.0; 2], vec![1.0, 0.0, 0.0, 1.0], vec![1.0; 4]);
        let problem = Problem { shape, dtype: DType::F32, start: None, q, k: keys.to_vec(), v, d_out };
        let results = problem.run(NumericModel::F32);
        for (found, expected) in results.out[2..].iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{keys:?}: {found}");
        }
        assert!(results.named().iter().all(|(_, x)| x.iter().all(|x| x.is_finite())), "{results:?}");
    }
}

/// Exponents on both sides of 2^24, and the largest and the smallest scale.
#[test]
fn bits_are_those_of_the_rule_for_scores_of_any_size() {
    for (dtype, model) in ARITHMETIC {
        let shape = shape(1, 140, 2, 1, 8, 5);
        for scale in [shape.scale, f32::MAX, f32::from_bits(1)] {
            let mut problem = Problem::new(AttentionShape { scale, ..shape }, dtype, 97);
            for (row, q) in problem.q.chunks_mut(16).enumerate() {
                let power = [0, 19, 20, 21, 22, 23, 40, 124, -124][row % 9];
                q.iter_mut().for_each(|x| *x *= 2f32.powi(power));
            }
            assert_bits(&problem.run(model), &problem.naive(model), &format!("{dtype:?} {model:?} {scale:e}"));
        }
    }
}

/// The exponent of a score relative to a maximum or a log-sum-exp, rounded once where that is small.
fn exponent(score: f32, c: f32, from: f32) -> f32 {
    if from.abs() < 16_777_216.0 { score.mul_add(c, -from) } else { score * c - from }
}

/// The results in f64 with a bound of the f32 error of each: the usual analysis, u = 2^-24, first order in u, doubled.
struct Wide {
    value: Vec<f64>,
    bound: Vec<f64>,
}

impl Wide {
    fn zeros(len: usize) -> Self {
        Wide { value: vec![0.0; len], bound: vec![0.0; len] }
    }

    /// Adds a term of a sum, with the error of the term and that of `roundings` roundings of it.
    fn add(&mut self, i: usize, term: f64, error: f64, roundings: usize) {
        self.value[i] += term;
        self.bound[i] += error + term.abs() * roundings as f64 * U;
    }

    fn check(&self, name: &str, found: &[f32]) {
        for (i, (&found, (value, bound))) in found.iter().zip(self.value.iter().zip(&self.bound)).enumerate() {
            let error = (f64::from(found) - value).abs();
            assert!(error <= 2.0 * bound + 1e-30, "{name}[{i}] is {found:e}, not {value:e}: {error:e} off");
        }
    }
}

const U: f64 = 1.0 / (1 << 24) as f64;

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn dot_abs(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| (f64::from(a) * f64::from(b)).abs()).sum()
}

impl Problem {
    /// out, lse, d_q, d_k, d_v in f64.
    fn wide(&self) -> [Wide; 5] {
        let s = self.shape;
        let (n, scale) = (s.sequence, f64::from(s.scale));
        let tokens = s.batch * n;
        let mut out = Wide::zeros(self.d_out.len());
        let mut lse = Wide::zeros(tokens * s.heads);
        let [mut d_q, mut d_k, mut d_v] = [&self.q, &self.k, &self.v].map(|x| Wide::zeros(x.len()));
        // Terms of the longest chain, over the rows of all heads.
        let terms = n * s.heads / s.kv_heads + 2;
        for (token, head) in (0..tokens).flat_map(|t| (0..s.heads).map(move |h| (t, h))) {
            let first = token / n * n;
            let seen = first + self.start(token)..token + 1;
            let (q, d_out) = (self.q(token, head), self.d_out(token, head));
            let scores: Vec<f64> = seen.clone().map(|key| dot(q, self.k(key, head)) * scale).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
            // Error of a score: the chain and the factor.
            let worst = seen.clone().map(|key| dot_abs(q, self.k(key, head)) * scale).fold(0.0, f64::max);
            let score_error = worst * (s.qk_dim + 1) as f64 * U;
            // Relative error of a probability and of their sum. Its exponent is that of a difference of two scores, at most
            // `worst` in size each: the factor of both errs by 2u (itself, and the constant in it), the larger one's product
            // by u, the difference by 2u. ex2 errs by 3u once a tile; and additions.
            let rel =
                2.0 * score_error + (2.0 * 2.0 * worst + worst + 2.0 * worst + 5.0) * U * (n.div_ceil(128) + 1) as f64;
            let sum_rel = rel + (n + 8) as f64 * U;
            let i = token * s.heads + head;
            // To base 2.
            lse.value[i] = (max + sum.ln()) * LOG2_E;
            lse.bound[i] = (score_error + sum_rel) * LOG2_E
                + 4.0 * U * (lse.value[i].abs() + (sum.ln().abs() + max.abs()) * LOG2_E);
            let p: Vec<f64> = scores.iter().map(|x| (x - max).exp() / sum).collect();
            let at = i * s.v_dim;
            for (key, &p) in seen.clone().zip(&p) {
                for (j, &v) in self.v(key, head).iter().enumerate() {
                    let term = p * f64::from(v);
                    out.add(at + j, term, term.abs() * (rel + sum_rel), n + 9);
                }
            }
            let delta: f64 = (0..s.v_dim).map(|j| f64::from(d_out[j]) * out.value[at + j]).sum();
            let delta_error: f64 = (0..s.v_dim)
                .map(|j| {
                    f64::from(d_out[j]).abs() * (out.bound[at + j] + out.value[at + j].abs() * (s.v_dim + 6) as f64 * U)
                })
                .sum();
            let p_rel = score_error + (lse.bound[i] + lse.value[i].abs() * U) / LOG2_E + (3.0 * worst + 5.0) * U;
            for (key, &p) in seen.zip(&p) {
                let (k, v) = (self.k(key, head), self.v(key, head));
                let dp = dot(d_out, v);
                let dp_error = dot_abs(d_out, v) * s.v_dim as f64 * U;
                let ds = p * (dp - delta);
                let ds_error = p * ((dp.abs() + delta.abs()) * (p_rel + 3.0 * U) + dp_error + delta_error);
                let kv = key * s.kv_heads + self.kv(head);
                for (j, &g) in d_out.iter().enumerate() {
                    let term = p * f64::from(g);
                    d_v.add(kv * s.v_dim + j, term, term.abs() * p_rel, terms);
                }
                for (j, (&q, &k)) in q.iter().zip(k).enumerate() {
                    let (q, k) = (scale * f64::from(q), scale * f64::from(k));
                    d_k.add(kv * s.qk_dim + j, ds * q, ds_error * q.abs(), terms);
                    d_q.add(i * s.qk_dim + j, ds * k, ds_error * k.abs(), terms);
                }
            }
        }
        [out, lse, d_q, d_k, d_v]
    }
}

#[test]
fn f32_errors_stay_below_their_bounds() {
    for problem in [
        Problem::new(shape(2, 129, 4, 2, 24, 16), DType::F32, 81),
        Problem::new(shape(1, 300, 2, 1, 64, 32), DType::F32, 82).packed(&[90, 210]),
        Problem::new(shape(1, 1, 1, 1, 3, 7), DType::F32, 83),
    ] {
        let results = problem.run(NumericModel::F32);
        for ((name, found), wide) in results.named().into_iter().zip(problem.wide()) {
            wide.check(name, found);
        }
    }
}

#[test]
fn the_f64_gradients_are_those_of_the_f64_result() {
    let problem = Problem::new(shape(1, 6, 2, 1, 3, 2), DType::F32, 91).packed(&[2, 4]);
    let [_, _, d_q, d_k, d_v] = problem.wide();
    let loss = |p: &Problem| {
        let [out, ..] = p.wide();
        out.value.iter().zip(&p.d_out).map(|(o, &d)| o * f64::from(d)).sum::<f64>()
    };
    type Operand = fn(&mut Problem) -> &mut Vec<f32>;
    let operands: [(Operand, Wide); 3] = [(|p| &mut p.q, d_q), (|p| &mut p.k, d_k), (|p| &mut p.v, d_v)];
    for (operand, gradient) in operands {
        for i in 0..gradient.value.len() {
            // A power of two: exact in f32. The quotient errs by h^2 times a third derivative of at most a few units.
            let shifted = |by: f32| {
                let mut p = problem.clone();
                operand(&mut p)[i] += by;
                loss(&p)
            };
            let h = 1.0 / 1024.0;
            let expected = (shifted(h) - shifted(-h)) / f64::from(2.0 * h);
            assert!((gradient.value[i] - expected).abs() < 1e-5, "{i}: {} is not {expected}", gradient.value[i]);
        }
    }
}

#[test]
fn extents_without_sense_are_named() {
    let bad = Problem::new(shape(1, 2, 2, 3, 2, 2), DType::F32, 95);
    let error = bad.try_run(&Host::new(HostOptions::default()).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "attention: kv_heads is 3, expected a divisor of the 2 heads");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn bits_are_those_of_the_rule_on_any_shape(
        (batch, sequence, kv_heads, group) in (1usize..3, 0usize..70, 1usize..3, 1usize..3),
        (qk_dim, v_dim, seed, arithmetic) in (1usize..20, 1usize..10, any::<u16>(), 0usize..3),
        starts in prop::option::of(prop::collection::vec(any::<u32>(), 140)),
    ) {
        let (dtype, model) = ARITHMETIC[arithmetic];
        let mut problem = Problem::new(shape(batch, sequence, kv_heads * group, kv_heads, qk_dim, v_dim), dtype, seed.into());
        // Any key up to the row's own, which is more than packing makes.
        problem.start = starts.map(|starts| {
            let row = |t: usize| u32::try_from(t % sequence).unwrap();
            (0..batch * sequence).map(|t| starts[t] % (row(t) + 1)).collect()
        });
        assert_bits(&problem.run(model), &problem.naive(model), "a random shape");
    }
}
