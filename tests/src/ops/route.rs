//! Routing.

#[cfg(test)]
mod properties;

use dropless_core::ops::{Balance, Layout, NONE, Plan, Route, Score, TopK, TopKGrad, Window};
use dropless_core::{DType, Tensor};

use crate::differential::{Maker, Problem};

pub(crate) const PROBLEMS: [Problem; 4] = [
    Problem::new("top_k", top_k),
    Problem::new("top_k_grad", top_k_grad),
    Problem::new("plan", plan),
    Problem::new("layout", layout),
];

/// `tokens` rows of k experts, distinct but for those that stray; some rows are padding.
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
    m.stray(&mut ids, experts);
    ids
}

/// Logits with ties now and then.
fn logits(m: &mut Maker<'_>, shape: [usize; 2]) -> Tensor {
    let coarse = m.below(3) == 0;
    let values: Vec<f32> = (0..shape[0] * shape[1])
        .map(|_| {
            let x = m.random.value() * 3.0;
            if coarse { x.round() } else { x }
        })
        .collect();
    m.with_bytes(DType::F32, &shape, bytemuck::cast_slice(&values))
}

fn top_k(m: &mut Maker<'_>) {
    let groups = m.one_of(&[1, 1, 2, 4]);
    // Few distinct numbers: each has a pipeline of its own.
    let experts = groups * m.one_of(&[1, 5, 17, 64]);
    let top_groups = 1 + m.below(groups);
    let k = 1 + m.below((top_groups * experts / groups).min(8));
    let sequence = 1 + m.below(300);
    let tokens = sequence * (1 + m.below(3));
    let score = m.one_of(&[Score::Sigmoid, Score::Softmax]);
    let (normalize, scale) = (m.flag(), m.one_of(&[1.0, 2.5]));
    let logits = logits(m, [tokens, experts]);
    let bias = m.tensor(DType::F32, &[experts]);
    let valid: Vec<u32> = (0..tokens).map(|_| u32::from(m.random.below(5) > 0)).collect();
    let valid = m.integers(&[tokens], &valid);
    let (scores, weights) =
        (m.output("scores", DType::F32, &[tokens, experts]), m.output("weights", DType::F32, &[tokens, k]));
    let (ids, counts) = (m.output("ids", DType::U32, &[tokens, k]), m.in_place("counts", DType::U32, &[experts]));
    let sequences = tokens / sequence;
    let (loads, loss) =
        (m.output("loads", DType::U32, &[sequences, experts]), m.output("loss", DType::F32, &[sequences]));
    let balance = Balance { coefficient: 1e-3, sequence, counts: &loads, loss: &loss };
    let balance = m.flag().then_some(balance);
    let bias = m.flag().then_some(&bias);
    let valid = m.flag().then_some(&valid);
    m.run(
        Route::TopK(TopK {
            logits: &logits,
            bias,
            valid,
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
        }),
        Route::run,
    );
    let (d_weights, d_logits) =
        (m.tensor(DType::F32, &[tokens, k]), m.output("d_logits", DType::F32, &[tokens, experts]));
    m.run(
        Route::TopKGrad(TopKGrad {
            scores: &scores,
            ids: &ids,
            d_weights: &d_weights,
            score,
            normalize,
            scale,
            balance,
            d_logits: &d_logits,
        }),
        Route::run,
    );
}

/// The gradient for choices of any kind.
fn top_k_grad(m: &mut Maker<'_>) {
    let experts = m.one_of(&[1, 5, 17, 64]);
    let k = 1 + m.below(experts.min(8));
    let sequence = 1 + m.below(150);
    let sequences = 1 + m.below(3);
    let tokens = sequence * sequences;
    let score = m.one_of(&[Score::Sigmoid, Score::Softmax]);
    let (normalize, scale) = (m.flag(), m.one_of(&[1.0, 2.5]));
    let ids = ids(m, tokens, k, experts);
    let ids = m.integers(&[tokens, k], &ids);
    let (scores, d_weights) = (m.tensor(DType::F32, &[tokens, experts]), m.tensor(DType::F32, &[tokens, k]));
    let loads: Vec<u32> = (0..sequences * experts).map(|_| m.random.below(sequence * k + 1) as u32).collect();
    let (loads, loss) = (m.integers(&[sequences, experts], &loads), m.tensor(DType::F32, &[sequences]));
    let balance = m.flag().then_some(Balance { coefficient: 1e-3, sequence, counts: &loads, loss: &loss });
    let d_logits = m.output("d_logits", DType::F32, &[tokens, experts]);
    m.run(
        Route::TopKGrad(TopKGrad {
            scores: &scores,
            ids: &ids,
            d_weights: &d_weights,
            score,
            normalize,
            scale,
            balance,
            d_logits: &d_logits,
        }),
        Route::run,
    );
}

fn plan(m: &mut Maker<'_>) {
    let (experts, period) = (1 + m.below(40), m.extent(150));
    let k = 1 + m.below(experts.min(8));
    let tokens = period * (1 + m.below(3));
    let ids = ids(m, tokens, k, experts);
    let ids = m.integers(&[tokens, k], &ids);
    let capacity = tokens + m.below(5);
    let (rows, counts) = (m.output("rows", DType::U32, &[1, capacity]), m.output("counts", DType::U32, &[1]));
    let positions = m.output("positions", DType::U32, &[tokens, 1]);
    let from = m.below(period);
    let to = from + m.below(period - from + 1);
    let window = m.flag().then_some(Window { period, from, to });
    m.run(
        Route::Plan(Plan { ids: &ids, experts, window, rows: &rows, counts: &counts, positions: &positions }),
        Route::run,
    );
}

fn layout(m: &mut Maker<'_>) {
    let experts = 1 + m.below(40);
    let k = 1 + m.below(experts.min(8));
    let first_expert = m.below(experts);
    let local = 1 + m.below(experts - first_expert);
    let (chunks, capacity) = (1 + m.below(3), m.extent(100));
    let rows = chunks * capacity;
    let ids = ids(m, rows, k, experts);
    let ids = m.integers(&[chunks, capacity, k], &ids);
    let mut counts: Vec<u32> = (0..chunks).map(|_| m.random.below(capacity + 1) as u32).collect();
    m.stray(&mut counts, capacity + 1);
    let counts = m.integers(&[chunks], &counts);
    let weights = m.tensor(DType::F32, &[chunks, capacity, k]);
    let slots = rows * k.min(local) + m.below(4);
    let (offsets, slot_rows) =
        (m.output("offsets", DType::U32, &[local + 1]), m.output("slot_rows", DType::U32, &[slots]));
    let (slot_weights, row_slots) =
        (m.output("slot_weights", DType::F32, &[slots]), m.output("row_slots", DType::U32, &[chunks, capacity, k]));
    m.run(
        Route::Layout(Layout {
            ids: &ids,
            counts: &counts,
            weights: &weights,
            first_expert,
            offsets: &offsets,
            slot_rows: &slot_rows,
            slot_weights: &slot_weights,
            row_slots: &row_slots,
        }),
        Route::run,
    );
}
