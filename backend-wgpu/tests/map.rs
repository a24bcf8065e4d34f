//! Every row-wise op against the host, bit by bit.

#![expect(clippy::cast_possible_truncation, reason = "small sizes and random bits are cut on purpose")]

mod support;

use dropless_core::ops::*;
use dropless_core::{DType, NumericModel, Tensor};
use support::{Maker, agree};

fn check(name: &str, problem: impl Fn(&mut Maker<'_>) -> Vec<Tensor>) {
    agree(name, NumericModel::Hopper, problem);
}

#[test]
fn elementwise() {
    check("cast", |m| {
        let (n, x, out) = (m.extent(3000), m.float(), m.float());
        let (x, out) = (m.tensor(x, &[n]), m.tensor(out, &[n]));
        Cast { x: &x, out: &out }.run(m.backend).unwrap();
        vec![x, out]
    });
    check("add", |m| {
        let n = m.extent(3000);
        let [a, b, c, out] = [0; 4].map(|_| {
            let dtype = m.float();
            m.tensor(dtype, &[n])
        });
        let c = (m.random.below(2) == 0).then_some(&c);
        Add { a: &a, b: &b, c, out: &out }.run(m.backend).unwrap();
        vec![out]
    });
    check("fill", |m| {
        let n = m.extent(3000);
        let types = [DType::F32, DType::Bf16, DType::U32, DType::E4m3, DType::Ue8m0, DType::E2m1x2];
        let dtype = types[m.random.below(6)];
        let whole = m.tensor(dtype, &[n + 7]);
        let value = if matches!(dtype, DType::F32 | DType::Bf16) { m.random.value() } else { 0.0 };
        Fill { out: &whole.slice(3, n + 3).unwrap(), value }.run(m.backend).unwrap();
        vec![whole]
    });
    check("copy_columns", |m| {
        let (rows, width) = (m.extent(30), m.extent(70));
        let dtype = [DType::F32, DType::Bf16, DType::U32][m.random.below(3)];
        let [x_column, out_column] = [0; 2].map(|_| m.random.below(9));
        let x = m.tensor(dtype, &[rows, x_column + width + 3]);
        let out = m.tensor(dtype, &[rows, out_column + width + 2]);
        CopyColumns { x: &x, x_column, out: &out, out_column, width }.run(m.backend).unwrap();
        vec![out]
    });
}

#[test]
fn rows() {
    check("gather_rows", |m| {
        let (sources, rows, cols) = (m.extent(20), m.extent(40), m.extent(90));
        let types = [(DType::F32, DType::Bf16), (DType::Bf16, DType::F32), (DType::U32, DType::U32)];
        let (from, to) = types[m.random.below(3)];
        let x = m.tensor(from, &[sources, cols]);
        let index: Vec<u32> =
            (0..rows).map(|_| if m.random.below(4) == 0 { NONE } else { m.random.below(sources) as u32 }).collect();
        let (index, out) = (m.integers(&[rows], &index), m.tensor(to, &[rows, cols]));
        GatherRows { x: &x, index: &index, out: &out }.run(m.backend).unwrap();
        vec![out]
    });
    check("combine", |m| {
        let (leaves, cols, slots) = (1 + m.random.below(40), m.extent(70), 1 + m.random.below(50));
        let period = m.extent(12);
        let rows = period * (1 + m.random.below(3));
        let lo = m.random.below(5);
        let given = m.random.below(3) > 0;
        let k = if given { 1 + m.random.below(leaves.min(9)) } else { leaves };
        let mut ids = Vec::new();
        for _ in 0..rows {
            let mut all: Vec<u32> = (0..leaves).map(|leaf| (lo + leaf) as u32).collect();
            for _ in 0..k {
                ids.push(all.swap_remove(m.random.below(all.len())));
            }
        }
        let places: Vec<u32> =
            (0..rows * k).map(|_| if m.random.below(3) == 0 { NONE } else { m.random.below(slots) as u32 }).collect();
        let types = [0; 4].map(|_| m.float());
        let (x, first, second) =
            (m.tensor(types[0], &[slots, cols]), m.tensor(types[1], &[rows, cols]), m.tensor(types[2], &[rows, cols]));
        let out = m.tensor(types[3], &[rows, cols]);
        let (ids, places) = (m.integers(&[rows, k], &ids), m.integers(&[rows, k], &places));
        let from = m.random.below(period);
        let to = from + m.random.below(period - from + 1);
        Combine {
            x: &x,
            slots: &places,
            ids: given.then_some(&ids),
            leaves: (lo, lo + leaves),
            window: (m.random.below(2) == 0).then_some(Window { period, from, to }),
            add: [(m.random.below(2) == 0).then_some(&first), (m.random.below(2) == 0).then_some(&second)],
            out: &out,
        }
        .run(m.backend)
        .unwrap();
        vec![out]
    });
    check("embedding_grad", |m| {
        let (groups, each, cols, vocabulary) = (1 + m.random.below(3), m.extent(50), m.extent(70), m.extent(20));
        let dtype = m.float();
        let dy = m.tensor(dtype, &[groups * each, cols]);
        let ids: Vec<u32> = (0..groups * each).map(|_| m.random.below(vocabulary) as u32).collect();
        let (ids, d_table) = (m.integers(&[groups * each], &ids), m.tensor(DType::F32, &[groups, vocabulary, cols]));
        EmbeddingGrad { dy: &dy, ids: &ids, d_table: &d_table }.run(m.backend).unwrap();
        vec![d_table]
    });
}

#[test]
fn reductions() {
    check("sum_rows", |m| {
        let (groups, each, cols, dtype) = (1 + m.random.below(3), m.extent(400), m.extent(70), m.float());
        let (x, out) = (m.tensor(dtype, &[groups * each, cols]), m.tensor(DType::F32, &[groups, cols]));
        SumRows { x: &x, out: &out }.run(m.backend).unwrap();
        vec![out]
    });
    check("sum_squares", |m| {
        let (rows, cols, dtype) = (m.extent(20), m.extent(1000), m.float());
        let (x, out) = (m.tensor(dtype, &[rows, cols]), m.tensor(DType::F32, &[rows]));
        SumSquares { x: &x, out: &out }.run(m.backend).unwrap();
        vec![out]
    });
    check("tree_sum", |m| {
        let (parts, n) = (m.extent(40), m.extent(300));
        let (x, out) = (m.tensor(DType::F32, &[parts, n]), m.tensor(DType::F32, &[n]));
        TreeSum { parts: &x, out: &out }.run(m.backend).unwrap();
        vec![out]
    });
}

#[test]
fn norm() {
    check("rms_norm", |m| {
        let (rows, cols, dtype) = (m.extent(20), m.extent(1000), m.float());
        let (x, weight) = (m.tensor(dtype, &[rows, cols]), m.tensor(DType::F32, &[cols]));
        let (out, rstd) = (m.tensor(dtype, &[rows, cols]), m.tensor(DType::F32, &[rows]));
        RmsNorm { x: &x, weight: &weight, eps: 1e-6, out: &out, rstd: &rstd }.run(m.backend).unwrap();
        vec![out, rstd]
    });
    check("rms_norm_grad", |m| {
        let (groups, each, cols, dtype) = (1 + m.random.below(3), m.extent(200), m.extent(300), m.float());
        let rows = groups * each;
        let [dy, x, residual, dx] = [0; 4].map(|_| m.tensor(dtype, &[rows, cols]));
        let (weight, rstd) = (m.tensor(DType::F32, &[cols]), m.tensor(DType::F32, &[rows]));
        let d_weight = m.tensor(DType::F32, &[groups, cols]);
        let residual = (m.random.below(2) == 0).then_some(&residual);
        RmsNormGrad { dy: &dy, x: &x, weight: &weight, rstd: &rstd, residual, dx: &dx, d_weight: &d_weight }
            .run(m.backend)
            .unwrap();
        vec![dx, d_weight]
    });
}

#[test]
fn swiglu() {
    check("swiglu", |m| {
        let (rows, width, dtype) = (m.extent(30), m.extent(300), m.float());
        let (gate_up, weight) = (m.tensor(dtype, &[rows, 2 * width]), m.tensor(DType::F32, &[rows]));
        let count = m.random.below(rows + 1) as u32;
        let (limit, out) = (m.integers(&[1], &[count]), m.tensor(dtype, &[rows, width]));
        let weight = (m.random.below(2) == 0).then_some(&weight);
        let limit = (m.random.below(2) == 0).then_some(&limit);
        Swiglu { gate_up: &gate_up, weight, limit, out: &out }.run(m.backend).unwrap();
        vec![out]
    });
    check("swiglu_grad", |m| {
        let (rows, width, dtype) = (m.extent(20), m.extent(300), m.float());
        let (gate_up, d_gate_up) = (m.tensor(dtype, &[rows, 2 * width]), m.tensor(dtype, &[rows, 2 * width]));
        let (d_out, weight, d_weight) =
            (m.tensor(dtype, &[rows, width]), m.tensor(DType::F32, &[rows]), m.tensor(DType::F32, &[rows]));
        let count = m.random.below(rows + 1) as u32;
        let limit = m.integers(&[1], &[count]);
        let weighted = m.random.below(2) == 0;
        let limit = (m.random.below(2) == 0).then_some(&limit);
        SwigluGrad {
            gate_up: &gate_up,
            weight: weighted.then_some(&weight),
            limit,
            d_out: &d_out,
            d_gate_up: &d_gate_up,
            d_weight: weighted.then_some(&d_weight),
        }
        .run(m.backend)
        .unwrap();
        vec![d_gate_up, d_weight]
    });
}

#[test]
fn cross_entropy() {
    check("cross_entropy", |m| {
        let (tokens, vocabulary) = (m.extent(20), m.extent(700));
        let [from, to] = [0; 2].map(|_| m.float());
        let logits = m.tensor(from, &[tokens, vocabulary]);
        let targets: Vec<u32> = (0..tokens)
            .map(|_| if m.random.below(5) == 0 { NONE } else { m.random.below(vocabulary) as u32 })
            .collect();
        let (targets, scale) = (m.integers(&[tokens], &targets), m.tensor(DType::F32, &[1]));
        let (loss, d_logits) = (m.tensor(DType::F32, &[tokens]), m.tensor(to, &[tokens, vocabulary]));
        let given = (m.random.below(3) > 0).then_some(&d_logits);
        CrossEntropy { logits: &logits, targets: &targets, scale: &scale, loss: &loss, d_logits: given }
            .run(m.backend)
            .unwrap();
        vec![loss, d_logits]
    });
}

#[test]
fn optimizer() {
    check("adamw", |m| {
        let n = m.extent(2000);
        let [grad, param, v, moment] = [0; 4].map(|_| m.tensor(DType::F32, &[n]));
        let (clip, step, half) = (m.tensor(DType::F32, &[2]), m.tensor(DType::F32, &[3]), m.tensor(DType::Bf16, &[n]));
        AdamW {
            grad: &grad,
            clip: &clip,
            step: &step,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decay: 0.1,
            param: &param,
            m: &moment,
            v: &v,
            half: (m.random.below(2) == 0).then_some(&half),
        }
        .run(m.backend)
        .unwrap();
        vec![param, moment, v, half]
    });
    check("clip_scale", |m| {
        let n = m.extent(300);
        let squares: Vec<f32> = (0..n).map(|_| m.random.value().abs()).collect();
        let squares = m.with_bytes(DType::F32, &[n], bytemuck::cast_slice(&squares));
        let out = m.tensor(DType::F32, &[2]);
        let max_norm = [0.0, 1.0, 1e9][m.random.below(3)];
        ClipScale { squares: &squares, max_norm, out: &out }.run(m.backend).unwrap();
        vec![out]
    });
    check("bias_update", |m| {
        let (parts, experts) = (m.extent(5), m.extent(70));
        let most = [3, 1000, u32::MAX][m.random.below(3)];
        let counts: Vec<u32> = (0..parts * experts).map(|_| m.random.next() % most).collect();
        let (counts, bias) = (m.integers(&[parts, experts], &counts), m.tensor(DType::F32, &[experts]));
        BiasUpdate { counts: &counts, rate: 1e-3, bias: &bias }.run(m.backend).unwrap();
        vec![bias]
    });
}

/// Positions and tables for `tokens` tokens and `pairs` pairs.
fn tables(m: &mut Maker<'_>, tokens: usize, pairs: usize) -> [Tensor; 3] {
    let positions: Vec<u32> = (0..tokens).map(|_| m.random.below(11) as u32).collect();
    [m.integers(&[tokens], &positions), m.tensor(DType::F32, &[11, pairs]), m.tensor(DType::F32, &[11, pairs])]
}

#[test]
fn rotary() {
    check("rotary", |m| {
        let (tokens, heads, half, dtype) = (m.extent(20), m.extent(5), m.extent(40), m.float());
        let [positions, cos, sin] = tables(m, tokens, half);
        let [x, out] = [0; 2].map(|_| m.tensor(dtype, &[tokens, heads * 2 * half]));
        let inverse = m.random.below(2) == 0;
        Rotary { x: &x, positions: &positions, cos: &cos, sin: &sin, inverse, out: &out }.run(m.backend).unwrap();
        vec![out]
    });
    check("mla", |m| {
        let (tokens, heads, nope, pairs, v) =
            (m.extent(20), m.extent(5), m.random.below(40), m.extent(20), m.extent(30));
        let (rope, dtype) = (2 * pairs, m.float());
        let shape = MlaShape { heads, nope, rope, v };
        let [positions, cos, sin] = tables(m, tokens, pairs);
        let [q_in, q, k] = [0; 3].map(|_| m.tensor(dtype, &[tokens, heads * (nope + rope)]));
        let kv = m.tensor(dtype, &[tokens, heads * (nope + v)]);
        let (k_rope, value) = (m.tensor(dtype, &[tokens, rope]), m.tensor(dtype, &[tokens, heads * v]));
        Mla {
            q_in: &q_in,
            kv: &kv,
            k_rope: &k_rope,
            positions: &positions,
            cos: &cos,
            sin: &sin,
            q: &q,
            k: &k,
            v: &value,
            shape,
        }
        .run(m.backend)
        .unwrap();
        let [d_q_in, d_kv] = [&q_in, &kv].map(|like| m.tensor(dtype, like.shape()));
        let d_k_rope = m.tensor(dtype, &[tokens, rope]);
        MlaGrad {
            d_q: &q,
            d_k: &k,
            d_v: &value,
            positions: &positions,
            cos: &cos,
            sin: &sin,
            d_q_in: &d_q_in,
            d_kv: &d_kv,
            d_k_rope: &d_k_rope,
            shape,
        }
        .run(m.backend)
        .unwrap();
        vec![q, k, value, d_q_in, d_kv, d_k_rope]
    });
}
