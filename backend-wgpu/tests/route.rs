//! Routing against the host, bit by bit.

#![expect(clippy::cast_possible_truncation, reason = "small sizes and random bits are cut on purpose")]

mod support;

use dropless_core::ops::{Balance, Layout, NONE, Plan, Route, Score, TopK, TopKGrad, Window};
use dropless_core::{DType, NumericModel, Tensor};
use support::{Maker, agree};

/// `tokens` rows of k distinct experts; some rows are padding.
fn ids(m: &mut Maker<'_>, tokens: usize, k: usize, experts: usize) -> Vec<u32> {
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let mut all: Vec<u32> = (0..experts as u32).collect();
        let padding = m.random.below(6) == 0;
        for _ in 0..k {
            let id = all.swap_remove(m.random.below(all.len()));
            ids.push(if padding { NONE } else { id });
        }
    }
    ids
}

/// Logits with ties now and then.
fn logits(m: &mut Maker<'_>, shape: [usize; 2]) -> Tensor {
    let coarse = m.random.below(3) == 0;
    let values: Vec<f32> = (0..shape[0] * shape[1])
        .map(|_| {
            let x = m.random.value() * 3.0;
            if coarse { x.round() } else { x }
        })
        .collect();
    m.with_bytes(DType::F32, &shape, bytemuck::cast_slice(&values))
}

#[test]
fn top_k() {
    agree("top_k", NumericModel::Hopper, |m| {
        let groups = [1, 1, 2, 4][m.random.below(4)];
        // Few distinct numbers: each has a pipeline of its own.
        let experts = groups * [1, 5, 17, 64][m.random.below(4)];
        let top_groups = 1 + m.random.below(groups);
        let k = 1 + m.random.below((top_groups * experts / groups).min(8));
        let sequence = 1 + m.random.below(300);
        let tokens = sequence * (1 + m.random.below(3));
        let score = [Score::Sigmoid, Score::Softmax][m.random.below(2)];
        let (normalize, scale) = (m.random.below(2) == 0, [1.0, 2.5][m.random.below(2)]);
        let logits = logits(m, [tokens, experts]);
        let bias = m.tensor(DType::F32, &[experts]);
        let valid: Vec<u32> = (0..tokens).map(|_| u32::from(m.random.below(5) > 0)).collect();
        let valid = m.integers(&[tokens], &valid);
        let (scores, weights) = (m.tensor(DType::F32, &[tokens, experts]), m.tensor(DType::F32, &[tokens, k]));
        let (ids, counts) = (m.tensor(DType::U32, &[tokens, k]), m.tensor(DType::U32, &[experts]));
        let sequences = tokens / sequence;
        let (loads, loss) = (m.tensor(DType::U32, &[sequences, experts]), m.tensor(DType::F32, &[sequences]));
        let balance = Balance { coefficient: 1e-3, sequence, counts: &loads, loss: &loss };
        let balance = (m.random.below(2) == 0).then_some(balance);
        Route::TopK(TopK {
            logits: &logits,
            bias: (m.random.below(2) == 0).then_some(&bias),
            valid: (m.random.below(2) == 0).then_some(&valid),
            score,
            groups,
            top_groups,
            normalize,
            scale,
            scores: &scores,
            ids: &ids,
            weights: &weights,
            counts: &counts,
            balance,
        })
        .run(m.backend)
        .unwrap();
        let (d_weights, d_logits) = (m.tensor(DType::F32, &[tokens, k]), m.tensor(DType::F32, &[tokens, experts]));
        Route::TopKGrad(TopKGrad {
            scores: &scores,
            ids: &ids,
            d_weights: &d_weights,
            score,
            normalize,
            scale,
            balance,
            d_logits: &d_logits,
        })
        .run(m.backend)
        .unwrap();
        vec![scores, ids, weights, counts, loads, loss, d_logits]
    });
}

#[test]
fn plan() {
    agree("plan", NumericModel::Hopper, |m| {
        let (experts, period) = (1 + m.random.below(40), m.extent(150));
        let k = 1 + m.random.below(experts.min(8));
        let tokens = period * (1 + m.random.below(3));
        let ids = ids(m, tokens, k, experts);
        let ids = m.integers(&[tokens, k], &ids);
        let capacity = tokens + m.random.below(5);
        let (rows, counts) = (m.tensor(DType::U32, &[1, capacity]), m.tensor(DType::U32, &[1]));
        let positions = m.tensor(DType::U32, &[tokens, 1]);
        let from = m.random.below(period);
        let to = from + m.random.below(period - from + 1);
        let window = (m.random.below(2) == 0).then_some(Window { period, from, to });
        Route::Plan(Plan { ids: &ids, experts, window, rows: &rows, counts: &counts, positions: &positions })
            .run(m.backend)
            .unwrap();
        vec![rows, counts, positions]
    });
}

#[test]
fn layout() {
    agree("layout", NumericModel::Hopper, |m| {
        let experts = 1 + m.random.below(40);
        let k = 1 + m.random.below(experts.min(8));
        let first_expert = m.random.below(experts);
        let local = 1 + m.random.below(experts - first_expert);
        let (chunks, capacity) = (1 + m.random.below(3), m.extent(100));
        let rows = chunks * capacity;
        let ids = ids(m, rows, k, experts);
        let ids = m.integers(&[chunks, capacity, k], &ids);
        let counts: Vec<u32> = (0..chunks).map(|_| m.random.below(capacity + 1) as u32).collect();
        let counts = m.integers(&[chunks], &counts);
        let weights = m.tensor(DType::F32, &[chunks, capacity, k]);
        let slots = rows * k.min(local) + m.random.below(4);
        let (offsets, slot_rows) = (m.tensor(DType::U32, &[local + 1]), m.tensor(DType::U32, &[slots]));
        let (slot_weights, row_slots) = (m.tensor(DType::F32, &[slots]), m.tensor(DType::U32, &[chunks, capacity, k]));
        Route::Layout(Layout {
            ids: &ids,
            counts: &counts,
            weights: &weights,
            first_expert,
            offsets: &offsets,
            slot_rows: &slot_rows,
            slot_weights: &slot_weights,
            row_slots: &row_slots,
        })
        .run(m.backend)
        .unwrap();
        vec![offsets, slot_rows, slot_weights, row_slots]
    });
}
