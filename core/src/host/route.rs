//! Routing on CPU threads, tokens side by side; the integer sorts run as their specification says. NUMERICS.md, "Routing".

mod choose;

use rayon::prelude::*;

use self::choose::Chooser;
use super::memory::{input, input_opt, min_rows, output};
use super::{Simd, simd};
use crate::backend::Backend;
use crate::error::Result;
use crate::ops::{Checked, NONE, Route, TopK, TopKGrad};

const OP: &str = "route";

pub(super) fn run(op: &Checked<Route<'_>>, host: &dyn Backend, simd: Simd) -> Result<()> {
    match &**op {
        Route::TopK(op) => top_k(op, simd),
        Route::TopKGrad(op) => top_k_grad(op, host, simd),
        Route::Plan(_) | Route::Layout(_) => op.spec(host),
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
            let sequence = balance.tokens_of(i, scores, ids, experts, k);
            sequence.count(counts);
            *loss = sequence.loss(balance.coefficient, counts);
        });
    }
    Ok(())
}

fn top_k_grad(op: &TopKGrad<'_>, host: &dyn Backend, simd: Simd) -> Result<()> {
    let (experts, k) = (op.scores.cols(), op.ids.cols());
    let (scores, ids, d_weights) = (input(OP, op.scores)?, input(OP, op.ids)?, input(OP, op.d_weights)?);
    let mut d_logits = output(OP, op.d_logits)?;
    let (scores, ids, d_weights) = (scores.f32(), ids.u32(), d_weights.f32());

    let slopes = op.balance.map(|balance| balance.slopes(host, scores, ids, k)).transpose()?;

    d_logits.f32().par_chunks_mut(experts).with_min_len(min_rows(experts)).enumerate().for_each_init(
        || vec![0.0; experts],
        |p, (t, d)| {
            let scores = &scores[t * experts..(t + 1) * experts];
            let (ids, d_weights) = (&ids[t * k..(t + 1) * k], &d_weights[t * k..(t + 1) * k]);
            let slopes = op.balance.zip(slopes.as_ref());
            let slopes = slopes.map(|(balance, all)| &all[t / balance.sequence * experts..][..experts]);
            simd::with(
                simd,
                #[inline(always)]
                || op.token(scores, ids, d_weights, slopes, p, d),
            );
        },
    );
    Ok(())
}
