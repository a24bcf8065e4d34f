//! Attention at production sizes.

use dropless_core::ops::{Attention, AttentionBackward, AttentionForward, AttentionShape};
use dropless_core::{DType, Result, Tensor};

use super::ops::Bench;

/// Heads and sequences of a model.
struct Case {
    name: &'static str,
    batch: usize,
    sequence: usize,
    heads: usize,
    kv_heads: usize,
    qk_dim: usize,
    v_dim: usize,
    /// Tokens of a document.
    document: usize,
}

const DEEPSEEK: Case = Case {
    name: "4x4096, 16 heads, 192/128",
    batch: 4,
    sequence: 4096,
    heads: 16,
    kv_heads: 16,
    qk_dim: 192,
    v_dim: 128,
    document: 4096,
};

const CASES: [Case; 5] = [
    DEEPSEEK,
    Case { name: "4x4096 in documents of 512, 192/128", document: 512, ..DEEPSEEK },
    Case { name: "8x4096, 32/8 heads, 128/128", batch: 8, heads: 32, kv_heads: 8, qk_dim: 128, ..DEEPSEEK },
    Case { name: "2x8192, 16 heads, 128/128", batch: 2, sequence: 8192, qk_dim: 128, document: 8192, ..DEEPSEEK },
    Case { name: "1x32768, 16 heads, 128/128", batch: 1, sequence: 32768, qk_dim: 128, document: 32768, ..DEEPSEEK },
];

impl Case {
    fn shape(&self) -> AttentionShape {
        let &Case { batch, sequence, heads, kv_heads, qk_dim, v_dim, .. } = self;
        AttentionShape { batch, sequence, heads, kv_heads, qk_dim, v_dim, scale: 1.0 / (qk_dim as f32).sqrt() }
    }

    /// Pairs of a row and a key that it sees.
    fn pairs(&self) -> f64 {
        (self.batch * self.sequence * (self.document + 1) / 2 * self.heads) as f64
    }
}

impl Bench<'_> {
    /// Forward and backward; TFLOP/s of the products over what rows see: two forward, five backward.
    pub(super) fn attention_shapes(&mut self, data: &Tensor) -> Result<()> {
        CASES.iter().try_for_each(|case| self.attention_case(case, data))
    }

    fn attention_case(&mut self, case: &Case, data: &Tensor) -> Result<()> {
        let shape = case.shape();
        let tokens = shape.batch * shape.sequence;
        let [qk, v] = [shape.qk_dim, shape.v_dim].map(|dim| shape.heads * dim);
        let [kv_qk, kv_v] = [shape.qk_dim, shape.v_dim].map(|dim| shape.kv_heads * dim);
        let random = |cols: usize, from: usize| data.slice(from, from + tokens * cols)?.reshape(&[tokens, cols]);
        let (q, k, values, d_out) =
            (random(qk, 0)?, random(kv_qk, 1 << 28)?, random(kv_v, 1 << 29)?, random(v, 1 << 30)?);
        let start: Vec<u32> = (0..tokens)
            .map(|token| u32::try_from(token % shape.sequence / case.document * case.document).expect("a sequence"))
            .collect();
        let start = self.backend.upload(DType::U32, &[tokens], &start)?;
        let start = (case.document < case.sequence).then_some(&start);
        let empty = |cols: usize| self.empty(DType::Bf16, &[tokens, cols]);
        let (out, lse) = (empty(v)?, self.empty(DType::F32, &[tokens, shape.heads])?);
        let forward = AttentionForward { q: &q, k: &k, v: &values, start, out: &out, lse: &lse, shape };
        let (d_q, d_k, d_v) = (empty(qk)?, empty(kv_qk)?, empty(kv_v)?);
        let backward = AttentionBackward {
            q: &q,
            k: &k,
            v: &values,
            start,
            out: &out,
            lse: &lse,
            d_out: &d_out,
            d_q: &d_q,
            d_k: &d_k,
            d_v: &d_v,
            shape,
        };
        let work = |qk: usize, v: usize| 2.0 * case.pairs() * (qk * shape.qk_dim + v * shape.v_dim) as f64;
        for (name, op, work) in [
            ("forward", Attention::Forward(forward), work(1, 1)),
            ("backward", Attention::Backward(backward), work(3, 2)),
        ] {
            let time = self.time(|| op.run(self.backend))?;
            let rate = format!("{:.0} TFLOP/s", work / time.as_secs_f64() / 1e12);
            self.line(&format!("attention {name} {}", case.name), time, &rate);
        }
        Ok(())
    }
}
