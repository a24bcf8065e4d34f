//! Attention against the host, bit by bit. Values are finite: what a hidden key's infinity does is left open.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "tests may panic, and their numbers are small"
)]

mod support;

use dropless_core::numerics::bf16;
use dropless_core::ops::{Attention, AttentionBackward, AttentionForward, AttentionShape};
use dropless_core::{DType, NumericModel, Tensor};
use support::{Maker, agree};

fn finite(m: &mut Maker<'_>, dtype: DType, shape: &[usize]) -> Tensor {
    let values: Vec<f32> =
        (0..shape.iter().product()).map(|_| Some(m.random.value()).filter(|x| x.abs() < 8.0).unwrap_or(0.5)).collect();
    match dtype {
        DType::F32 => m.with_bytes(dtype, shape, bytemuck::cast_slice(&values)),
        _ => {
            let codes: Vec<u16> = values.into_iter().map(bf16::from_f32).collect();
            m.with_bytes(dtype, shape, bytemuck::cast_slice(&codes))
        }
    }
}

fn problem(m: &mut Maker<'_>) -> Vec<Tensor> {
    let kv_heads = 1 + m.random.below(2);
    let heads = kv_heads * (1 + m.random.below(3));
    let (batch, sequence) = (1 + m.random.below(2), [1, 5, 64, 129, 1 + m.random.below(300)][m.random.below(5)]);
    let [qk_dim, v_dim] = [0; 2].map(|_| [1, 7, 16, 20, 24][m.random.below(5)]);
    let shape = AttentionShape { batch, sequence, heads, kv_heads, qk_dim, v_dim, scale: 0.3 };
    let (tokens, dtype) = (batch * sequence, m.float());
    let (q, k) = (finite(m, dtype, &[tokens, heads * qk_dim]), finite(m, dtype, &[tokens, kv_heads * qk_dim]));
    let (v, d_out) = (finite(m, dtype, &[tokens, kv_heads * v_dim]), finite(m, dtype, &[tokens, heads * v_dim]));
    let (out, lse) = (m.tensor(dtype, &[tokens, heads * v_dim]), m.tensor(DType::F32, &[tokens, heads]));
    // Documents: the start is that of a row's document, now and then past the row.
    let mut start = Vec::new();
    for _ in 0..batch {
        let mut first = 0;
        for row in 0..sequence {
            if m.random.below(40) == 0 {
                first = row;
            }
            start.push(if m.random.below(100) == 0 { row as u32 + 1 } else { first as u32 });
        }
    }
    let start = m.integers(&[tokens], &start);
    let start = (m.random.below(2) == 0).then_some(&start);
    Attention::Forward(AttentionForward { q: &q, k: &k, v: &v, start, out: &out, lse: &lse, shape })
        .run(m.backend)
        .unwrap();
    let [d_q, d_k, d_v] = [&q, &k, &v].map(|like| m.tensor(dtype, like.shape()));
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
        shape,
    })
    .run(m.backend)
    .unwrap();
    vec![out, lse, d_q, d_k, d_v]
}

#[test]
fn hopper() {
    agree("attention", NumericModel::Hopper, problem);
}

#[test]
fn f32() {
    agree("attention", NumericModel::F32, problem);
}
