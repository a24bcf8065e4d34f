//! Routing on CPU threads: tokens side by side, the integer sorts on one thread. NUMERICS.md, "Routing".

use rayon::prelude::*;

use super::memory::{input, input_opt, min_rows, output};
use super::{Simd, simd};
use crate::error::Result;
use crate::ops::{Balance, Checked, Chooser, Layout, NONE, Plan, Route, Sequence, TopK, TopKGrad, known};

const OP: &str = "route";

pub(super) fn run(op: &Checked<Route<'_>>, simd: Simd) -> Result<()> {
    match &**op {
        Route::TopK(op) => top_k(op, simd),
        Route::TopKGrad(op) => top_k_grad(op, simd),
        Route::Plan(op) => plan(op),
        Route::Layout(op) => layout(op),
    }
}

fn top_k(op: &TopK<'_>, simd: Simd) -> Result<()> {
    let (experts, k) = (op.scores.cols(), op.ids.cols());
    let (logits, bias, valid) = (input(OP, op.logits)?, input_opt(OP, op.bias)?, input_opt(OP, op.valid)?);
    let (mut scores, mut ids) = (output(OP, op.scores)?, output(OP, op.ids)?);
    let (mut weights, mut counts) = (output(OP, op.weights)?, output(OP, op.counts)?);
    let (logits, valid) = (logits.f32(), valid.as_ref().map(|v| v.u32()));
    let bias = bias.as_ref().map(|b| b.f32());

    let outputs = (scores.f32().par_chunks_mut(experts), ids.u32().par_chunks_mut(k), weights.f32().par_chunks_mut(k));
    outputs.into_par_iter().with_min_len(min_rows(experts)).enumerate().for_each_init(
        || Chooser::new(*op, bias),
        |chooser, (t, (scores, ids, weights))| {
            let logits = &logits[t * experts..(t + 1) * experts];
            let valid = valid.is_none_or(|valid| valid[t] != 0);
            simd::with(
                simd,
                #[inline(always)]
                || chooser.token(logits, valid, scores, ids, weights),
            );
        },
    );

    let (scores, ids, counts) = (&*scores.f32(), &*ids.u32(), counts.u32());
    for &id in ids.iter().filter(|&&id| id != NONE) {
        counts[id as usize] += 1;
    }
    if let Some(balance) = &op.balance {
        let (mut counts, mut loss) = (output(OP, balance.counts)?, output(OP, balance.loss)?);
        let outputs = (counts.u32().par_chunks_mut(experts), loss.f32().par_iter_mut());
        outputs.into_par_iter().enumerate().for_each(|(i, (counts, loss))| {
            let sequence = sequence(balance, i, scores, ids, experts, k);
            sequence.count(counts);
            *loss = sequence.loss(balance.coefficient, counts);
        });
    }
    Ok(())
}

/// The tokens of sequence i.
fn sequence<'a>(
    balance: &Balance<'_>,
    i: usize,
    scores: &'a [f32],
    ids: &'a [u32],
    experts: usize,
    k: usize,
) -> Sequence<'a> {
    let tokens = i * balance.sequence..(i + 1) * balance.sequence;
    Sequence {
        scores: &scores[tokens.start * experts..tokens.end * experts],
        ids: &ids[tokens.start * k..tokens.end * k],
        k,
        experts,
    }
}

fn top_k_grad(op: &TopKGrad<'_>, simd: Simd) -> Result<()> {
    let (experts, k) = (op.scores.cols(), op.ids.cols());
    let (scores, ids, d_weights) = (input(OP, op.scores)?, input(OP, op.ids)?, input(OP, op.d_weights)?);
    let mut d_logits = output(OP, op.d_logits)?;
    let (scores, ids, d_weights) = (scores.f32(), ids.u32(), d_weights.f32());
    known(ids, k, experts)?;

    let slopes = op.balance.as_ref().map(|balance| -> Result<(usize, Vec<f32>)> {
        let counts = input(OP, balance.counts)?;
        let mut slopes = vec![0.0; balance.counts.len()];
        for (i, (slopes, counts)) in slopes.chunks_mut(experts).zip(counts.u32().chunks(experts)).enumerate() {
            sequence(balance, i, scores, ids, experts, k).slopes(balance.coefficient, counts, slopes);
        }
        Ok((balance.sequence, slopes))
    });
    let slopes = slopes.transpose()?;

    d_logits.f32().par_chunks_mut(experts).with_min_len(min_rows(experts)).enumerate().for_each_init(
        || vec![0.0; experts],
        |p, (t, d)| {
            let scores = &scores[t * experts..(t + 1) * experts];
            let (ids, d_weights) = (&ids[t * k..(t + 1) * k], &d_weights[t * k..(t + 1) * k]);
            let slopes = slopes.as_ref().map(|(sequence, all)| &all[t / sequence * experts..][..experts]);
            simd::with(
                simd,
                #[inline(always)]
                || op.token(scores, ids, d_weights, slopes, p, d),
            );
        },
    );
    Ok(())
}

fn plan(op: &Plan<'_>) -> Result<()> {
    let ids = input(OP, op.ids)?;
    let (mut rows, mut counts) = (output(OP, op.rows)?, output(OP, op.counts)?);
    let mut positions = output(OP, op.positions)?;
    op.fill(ids.u32(), rows.u32(), counts.u32(), positions.u32())
}

fn layout(op: &Layout<'_>) -> Result<()> {
    let (ids, counts, weights) = (input(OP, op.ids)?, input(OP, op.counts)?, input(OP, op.weights)?);
    let (mut offsets, mut slot_rows) = (output(OP, op.offsets)?, output(OP, op.slot_rows)?);
    let (mut slot_weights, mut row_slots) = (output(OP, op.slot_weights)?, output(OP, op.row_slots)?);
    op.sort(ids.u32(), counts.u32(), offsets.u32(), slot_rows.u32(), row_slots.u32())?;
    for (&slot, &weight) in row_slots.u32().iter().zip(weights.f32()) {
        if slot != NONE {
            slot_weights.f32()[slot as usize] = weight;
        }
    }
    Ok(())
}
