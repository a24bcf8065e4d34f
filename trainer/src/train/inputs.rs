//! A rank's share of a micro-step, brought to the device.

use std::ops::Range;

use dropless_core::ops::NONE;
use dropless_core::{Backend, DType};

use crate::data::Batch;
use crate::error::Result;
use crate::model::{Inputs, NextInputs, single};

/// The sequences that rank `rank` of `ranks` takes from micro-step `micro` of `size` sequences.
pub(super) fn share(micro: usize, size: usize, rank: usize, ranks: usize) -> Range<usize> {
    let mine = size / ranks;
    let first = micro * size + rank * mine;
    first..first + mine
}

/// Targets of the multi-token-prediction module: the target of the next position of the same document.
pub(super) fn next_targets(targets: &[u32], sequence: usize) -> Vec<u32> {
    (0..targets.len())
        .map(|t| match targets[t] {
            NONE => NONE,
            _ if (t + 1).is_multiple_of(sequence) => NONE,
            _ => targets[t + 1],
        })
        .collect()
}

/// The factors of the loss gradients of a whole step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scales {
    /// 1 / (tokens with a target).
    pub(super) loss: f32,
    /// Coefficient / (tokens with a target two ahead); None without a multi-token-prediction module.
    pub(super) next: Option<f32>,
}

impl Scales {
    /// For a global batch; `next` is the coefficient of the multi-token-prediction loss.
    pub(super) fn new(batch: &Batch, sequence: usize, next: Option<f64>) -> Scales {
        let share = |coefficient: f64, targets: &[u32]| {
            let valid = targets.iter().filter(|&&t| t != NONE).count();
            single(coefficient / valid.max(1) as f64)
        };
        Scales {
            loss: share(1.0, &batch.targets),
            next: next.map(|coefficient| share(coefficient, &next_targets(&batch.targets, sequence))),
        }
    }
}

/// Uploads some sequences of a batch.
pub(super) fn upload(
    backend: &dyn Backend,
    batch: &Batch,
    sequence: usize,
    sequences: Range<usize>,
    scales: Scales,
) -> Result<Inputs> {
    let tokens = sequences.start * sequence..sequences.end * sequence;
    let put = |values: &[u32]| backend.upload(DType::U32, &[values.len()], values);
    let targets = &batch.targets[tokens.clone()];
    let scale = |s: f32| backend.upload(DType::F32, &[1], &[s]);
    let next = match scales.next {
        None => None,
        Some(next) => {
            let ids: Vec<u32> = targets.iter().map(|&t| if t == NONE { 0 } else { t }).collect();
            Some(NextInputs {
                ids: put(&ids)?,
                targets: put(&next_targets(targets, sequence))?,
                scale: scale(next)?,
            })
        }
    };
    Ok(Inputs {
        ids: put(&batch.ids[tokens.clone()])?,
        targets: put(targets)?,
        positions: put(&batch.positions[tokens.clone()])?,
        start: put(&batch.start[tokens])?,
        scale: scale(scales.loss)?,
        next,
    })
}
