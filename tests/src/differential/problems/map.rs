//! Every row-wise op.

use dropless_core::ops::*;
use dropless_core::{DType, Tensor};

use crate::differential::{Maker, Problem};

pub(super) const PROBLEMS: [Problem; 20] = [
    Problem::new("cast", cast),
    Problem::new("add", add),
    Problem::new("fill", fill),
    Problem::new("copy_columns", copy_columns),
    Problem::new("gather_rows", gather_rows),
    Problem::new("combine", combine),
    Problem::new("embedding_grad", embedding_grad),
    Problem::new("sum_rows", sum_rows),
    Problem::new("sum_squares", sum_squares),
    Problem::new("tree_sum", tree_sum),
    Problem::new("rms_norm", rms_norm),
    Problem::new("rms_norm_grad", rms_norm_grad),
    Problem::new("swiglu", swiglu),
    Problem::new("swiglu_grad", swiglu_grad),
    Problem::new("cross_entropy", cross_entropy),
    Problem::new("adamw", adamw),
    Problem::new("clip_scale", clip_scale),
    Problem::new("bias_update", bias_update),
    Problem::new("rotary", rotary),
    Problem::new("mla", mla),
];

fn cast(m: &mut Maker<'_>) {
    let (n, x, out) = (m.extent(3000), m.float(), m.float());
    let (x, out) = (m.tensor(x, &[n]), m.output("out", out, &[n]));
    m.run(Cast { x: &x, out: &out }, Cast::run);
}

fn add(m: &mut Maker<'_>) {
    let n = m.extent(3000);
    let [a, b, c] = [0; 3].map(|_| {
        let dtype = m.float();
        m.tensor(dtype, &[n])
    });
    let dtype = m.float();
    let out = m.output("out", dtype, &[n]);
    let c = m.flag().then_some(&c);
    m.run(Add { a: &a, b: &b, c, out: &out }, Add::run);
}

fn fill(m: &mut Maker<'_>) {
    let n = m.extent(3000);
    let types = [DType::F32, DType::Bf16, DType::U32, DType::E4m3, DType::Ue8m0, DType::E2m1x2];
    let dtype = m.one_of(&types);
    let out = m.output("out", dtype, &[n]);
    let value = if matches!(dtype, DType::F32 | DType::Bf16) { m.random.value() } else { 0.0 };
    m.run(Fill { out: &out, value }, Fill::run);
}

fn copy_columns(m: &mut Maker<'_>) {
    let (rows, width) = (m.extent(30), m.extent(70));
    let dtype = m.one_of(&[DType::F32, DType::Bf16, DType::U32]);
    let [x_column, out_column] = [0; 2].map(|_| m.below(9));
    let x = m.tensor(dtype, &[rows, x_column + width + 3]);
    let out = m.output("out", dtype, &[rows, out_column + width + 2]);
    m.run(CopyColumns { x: &x, x_column, out: &out, out_column, width }, CopyColumns::run);
}

fn gather_rows(m: &mut Maker<'_>) {
    let (sources, rows, cols) = (m.extent(20), m.extent(40), m.extent(90));
    let types = [(DType::F32, DType::Bf16), (DType::Bf16, DType::F32), (DType::U32, DType::U32)];
    let (from, to) = m.one_of(&types);
    let x = m.tensor(from, &[sources, cols]);
    let index: Vec<u32> =
        (0..rows).map(|_| if m.random.below(4) == 0 { NONE } else { m.random.below(sources) as u32 }).collect();
    let (index, out) = (m.integers(&[rows], &index), m.output("out", to, &[rows, cols]));
    m.run(GatherRows { x: &x, index: &index, out: &out }, GatherRows::run);
}

fn combine(m: &mut Maker<'_>) {
    let (leaves, cols, slots) = (1 + m.below(40), m.extent(70), 1 + m.below(50));
    let period = m.extent(12);
    let rows = period * (1 + m.below(3));
    let lo = m.below(5);
    let given = m.below(3) > 0;
    let k = if given { 1 + m.below(leaves.min(9)) } else { leaves };
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
    let out = m.output("out", types[3], &[rows, cols]);
    let (ids, places) = (m.integers(&[rows, k], &ids), m.integers(&[rows, k], &places));
    let from = m.below(period);
    let to = from + m.below(period - from + 1);
    let window = m.flag().then_some(Window { period, from, to });
    let add = [&first, &second].map(|addend| m.flag().then_some(addend));
    m.run(
        Combine {
            x: &x,
            slots: &places,
            ids: given.then_some(&ids),
            leaves: (lo, lo + leaves),
            window,
            add,
            out: &out,
        },
        Combine::run,
    );
}

fn embedding_grad(m: &mut Maker<'_>) {
    let (groups, each, cols, vocabulary) = (1 + m.below(3), m.extent(50), m.extent(70), m.extent(20));
    let dtype = m.float();
    let dy = m.tensor(dtype, &[groups * each, cols]);
    let ids: Vec<u32> = (0..groups * each).map(|_| m.random.below(vocabulary) as u32).collect();
    let (ids, d_table) =
        (m.integers(&[groups * each], &ids), m.in_place("d_table", DType::F32, &[groups, vocabulary, cols]));
    m.run(EmbeddingGrad { dy: &dy, ids: &ids, d_table: &d_table }, EmbeddingGrad::run);
}

fn sum_rows(m: &mut Maker<'_>) {
    let (groups, each, cols, dtype) = (1 + m.below(3), m.extent(400), m.extent(70), m.float());
    let (x, out) = (m.tensor(dtype, &[groups * each, cols]), m.output("out", DType::F32, &[groups, cols]));
    m.run(SumRows { x: &x, out: &out }, SumRows::run);
}

fn sum_squares(m: &mut Maker<'_>) {
    let (rows, cols, dtype) = (m.extent(20), m.extent(1000), m.float());
    let (x, out) = (m.tensor(dtype, &[rows, cols]), m.output("out", DType::F32, &[rows]));
    m.run(SumSquares { x: &x, out: &out }, SumSquares::run);
}

fn tree_sum(m: &mut Maker<'_>) {
    let (parts, n) = (m.extent(40), m.extent(300));
    let (x, out) = (m.tensor(DType::F32, &[parts, n]), m.output("out", DType::F32, &[n]));
    m.run(TreeSum { parts: &x, out: &out }, TreeSum::run);
}

fn rms_norm(m: &mut Maker<'_>) {
    let (rows, cols, dtype) = (m.extent(20), m.extent(1000), m.float());
    let (x, weight) = (m.tensor(dtype, &[rows, cols]), m.tensor(DType::F32, &[cols]));
    let (out, rstd) = (m.output("out", dtype, &[rows, cols]), m.output("rstd", DType::F32, &[rows]));
    m.run(RmsNorm { x: &x, weight: &weight, eps: 1e-6, out: &out, rstd: &rstd }, RmsNorm::run);
}

fn rms_norm_grad(m: &mut Maker<'_>) {
    let (groups, each, cols, dtype) = (1 + m.below(3), m.extent(200), m.extent(300), m.float());
    let rows = groups * each;
    let [dy, x, residual] = [0; 3].map(|_| m.tensor(dtype, &[rows, cols]));
    let dx = m.output("dx", dtype, &[rows, cols]);
    let (weight, rstd) = (m.tensor(DType::F32, &[cols]), m.tensor(DType::F32, &[rows]));
    let d_weight = m.in_place("d_weight", DType::F32, &[groups, cols]);
    let residual = m.flag().then_some(&residual);
    m.run(
        RmsNormGrad { dy: &dy, x: &x, weight: &weight, rstd: &rstd, residual, dx: &dx, d_weight: &d_weight },
        RmsNormGrad::run,
    );
}

fn swiglu(m: &mut Maker<'_>) {
    let (rows, width, dtype) = (m.extent(30), m.extent(300), m.float());
    let (gate_up, weight) = (m.tensor(dtype, &[rows, 2 * width]), m.tensor(DType::F32, &[rows]));
    let count = m.below(rows + 1) as u32;
    let (limit, out) = (m.integers(&[1], &[count]), m.output("out", dtype, &[rows, width]));
    let weight = m.flag().then_some(&weight);
    let limit = m.flag().then_some(&limit);
    m.run(Swiglu { gate_up: &gate_up, weight, limit, out: &out }, Swiglu::run);
}

fn swiglu_grad(m: &mut Maker<'_>) {
    let (rows, width, dtype) = (m.extent(20), m.extent(300), m.float());
    let (gate_up, d_gate_up) = (m.tensor(dtype, &[rows, 2 * width]), m.output("d_gate_up", dtype, &[rows, 2 * width]));
    let (d_out, weight, d_weight) =
        (m.tensor(dtype, &[rows, width]), m.tensor(DType::F32, &[rows]), m.output("d_weight", DType::F32, &[rows]));
    let count = m.below(rows + 1) as u32;
    let limit = m.integers(&[1], &[count]);
    let weighted = m.flag();
    let limit = m.flag().then_some(&limit);
    m.run(
        SwigluGrad {
            gate_up: &gate_up,
            weight: weighted.then_some(&weight),
            limit,
            d_out: &d_out,
            d_gate_up: &d_gate_up,
            d_weight: weighted.then_some(&d_weight),
        },
        SwigluGrad::run,
    );
}

fn cross_entropy(m: &mut Maker<'_>) {
    let (tokens, vocabulary) = (m.extent(20), m.extent(700));
    let [from, to] = [0; 2].map(|_| m.float());
    let logits = m.tensor(from, &[tokens, vocabulary]);
    let targets: Vec<u32> =
        (0..tokens).map(|_| if m.random.below(5) == 0 { NONE } else { m.random.below(vocabulary) as u32 }).collect();
    let (targets, scale) = (m.integers(&[tokens], &targets), m.tensor(DType::F32, &[1]));
    let (loss, d_logits) = (m.output("loss", DType::F32, &[tokens]), m.output("d_logits", to, &[tokens, vocabulary]));
    let given = (m.below(3) > 0).then_some(&d_logits);
    m.run(
        CrossEntropy { logits: &logits, targets: &targets, scale: &scale, loss: &loss, d_logits: given },
        CrossEntropy::run,
    );
}

fn adamw(m: &mut Maker<'_>) {
    let n = m.extent(2000);
    let grad = m.tensor(DType::F32, &[n]);
    let [param, moment, v] = ["param", "m", "v"].map(|name| m.in_place(name, DType::F32, &[n]));
    let (clip, step, half) =
        (m.tensor(DType::F32, &[2]), m.tensor(DType::F32, &[3]), m.output("half", DType::Bf16, &[n]));
    let half = m.flag().then_some(&half);
    m.run(
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
            half,
        },
        AdamW::run,
    );
}

fn clip_scale(m: &mut Maker<'_>) {
    let n = m.extent(300);
    let squares: Vec<f32> = (0..n).map(|_| m.random.value().abs()).collect();
    let squares = m.with_bytes(DType::F32, &[n], bytemuck::cast_slice(&squares));
    let out = m.output("out", DType::F32, &[2]);
    let max_norm = m.one_of(&[0.0, 1.0, 1e9]);
    m.run(ClipScale { squares: &squares, max_norm, out: &out }, ClipScale::run);
}

fn bias_update(m: &mut Maker<'_>) {
    let (parts, experts) = (m.extent(5), m.extent(70));
    let most = m.one_of(&[3, 1000, u32::MAX]);
    let counts: Vec<u32> = (0..parts * experts).map(|_| m.random.bits() % most).collect();
    let (counts, bias) = (m.integers(&[parts, experts], &counts), m.in_place("bias", DType::F32, &[experts]));
    m.run(BiasUpdate { counts: &counts, rate: 1e-3, bias: &bias }, BiasUpdate::run);
}

/// Positions and tables for `tokens` tokens and `pairs` pairs.
fn tables(m: &mut Maker<'_>, tokens: usize, pairs: usize) -> [Tensor; 3] {
    let positions: Vec<u32> = (0..tokens).map(|_| m.random.below(11) as u32).collect();
    [m.integers(&[tokens], &positions), m.tensor(DType::F32, &[11, pairs]), m.tensor(DType::F32, &[11, pairs])]
}

fn rotary(m: &mut Maker<'_>) {
    let (tokens, heads, half, dtype) = (m.extent(20), m.extent(5), m.extent(40), m.float());
    let [positions, cos, sin] = tables(m, tokens, half);
    let shape = [tokens, heads * 2 * half];
    let (x, out) = (m.tensor(dtype, &shape), m.output("out", dtype, &shape));
    let inverse = m.flag();
    m.run(Rotary { x: &x, positions: &positions, cos: &cos, sin: &sin, inverse, out: &out }, Rotary::run);
}

fn mla(m: &mut Maker<'_>) {
    let (tokens, heads, nope, pairs, v) = (m.extent(20), m.extent(5), m.below(40), m.extent(20), m.extent(30));
    let (rope, dtype) = (2 * pairs, m.float());
    let shape = MlaShape { heads, nope, rope, v };
    let [positions, cos, sin] = tables(m, tokens, pairs);
    let queries = [tokens, heads * (nope + rope)];
    let q_in = m.tensor(dtype, &queries);
    let [q, k] = ["q", "k"].map(|name| m.output(name, dtype, &queries));
    let kv = m.tensor(dtype, &[tokens, heads * (nope + v)]);
    let (k_rope, value) = (m.tensor(dtype, &[tokens, rope]), m.output("v", dtype, &[tokens, heads * v]));
    m.run(
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
        },
        Mla::run,
    );
    let [d_q_in, d_kv] = [("d_q_in", &q_in), ("d_kv", &kv)].map(|(name, of)| m.output(name, dtype, of.shape()));
    let d_k_rope = m.output("d_k_rope", dtype, &[tokens, rope]);
    m.run(
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
        },
        MlaGrad::run,
    );
}
