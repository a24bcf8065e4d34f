//! A rank's share of a micro-batch, brought to the device.

use dropless_core::ops::NONE;
use dropless_core::{Backend, DType, Error, Memory};
use dropless_model::nn::Tokens;
use dropless_model::{Inputs, NextInputs};

use crate::config::{Config, single};
use crate::data::{Batch, Share};
use crate::error::Result;

/// Targets of the multi-token-prediction module: the target of the next position of the same document.
fn next_targets(targets: &[u32], sequence: usize) -> Vec<u32> {
    (0..targets.len())
        .map(|t| match targets[t] {
            NONE => NONE,
            _ if (t + 1).is_multiple_of(sequence) => NONE,
            _ => targets[t + 1],
        })
        .collect()
}

/// The factors of the losses of a whole step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scales {
    /// 1 / (tokens with a target).
    pub(super) loss: f32,
    /// Of the multi-token-prediction module, if there is one.
    pub(super) next: Option<NextScale>,
}

/// The factors of the multi-token-prediction loss.
#[derive(Clone, Copy, Debug)]
pub(super) struct NextScale {
    /// 1 / (tokens with a target two ahead).
    pub(super) mean: f32,
    /// The same times the loss coefficient: the factor of the gradients.
    gradient: f32,
}

impl Scales {
    /// For a global batch; `next` is the coefficient of the multi-token-prediction loss, if there is such a module.
    pub(super) fn new(batch: &Batch, next: Option<f64>) -> Scales {
        let next = next.map(|coefficient| {
            let targets = next_targets(&batch.targets, batch.sequence);
            let valid = targets.iter().filter(|&&t| t != NONE).count().max(1) as f64;
            NextScale { mean: single(1.0 / valid), gradient: single(coefficient / valid) }
        });
        Scales { loss: single(1.0 / batch.valid.max(1) as f64), next }
    }
}

/// How the tokens of a micro-batch lie on this rank.
pub(super) fn tokens(backend: &dyn Backend, config: &Config) -> Result<Tokens> {
    let (train, ranks) = (&config.train, backend.caps().ranks);
    let tokens =
        Tokens::new(backend, train.micro_batch_size / ranks, train.sequence_length, train.grad_shards / ranks)?;
    Ok(tokens.with_expert_shards(backend, config.moe.expert_shards)?)
}

/// Brings whole sequences of `sequence` tokens to the device.
pub(super) fn upload(backend: &dyn Backend, share: Share<'_>, sequence: usize, scales: Scales) -> Result<Inputs> {
    let put = |values: &[u32]| backend.upload(DType::U32, &[values.len()], values);
    let scale = |s: f32| backend.upload(DType::F32, &[1], &[s]);
    let next = match scales.next {
        None => None,
        Some(next) => {
            let ids: Vec<u32> = share.targets.iter().map(|&t| if t == NONE { 0 } else { t }).collect();
            Some(NextInputs {
                ids: put(&ids)?,
                targets: put(&next_targets(share.targets, sequence))?,
                scale: scale(next.gradient)?,
            })
        }
    };
    Ok(Inputs {
        ids: put(share.ids)?,
        targets: put(share.targets)?,
        positions: put(share.positions)?,
        start: put(share.start)?,
        scale: scale(scales.loss)?,
        next,
    })
}

/// The tensors that [`upload`] makes for so many tokens, with undefined contents.
pub(super) fn blank(backend: &dyn Backend, tokens: usize, next: bool) -> Result<Inputs> {
    let ids = || backend.alloc(DType::U32, &[tokens], Memory::Device);
    let scale = || backend.alloc(DType::F32, &[1], Memory::Device);
    let next =
        next.then(|| Ok::<_, Error>(NextInputs { ids: ids()?, targets: ids()?, scale: scale()? })).transpose()?;
    Ok(Inputs { ids: ids()?, targets: ids()?, positions: ids()?, start: ids()?, scale: scale()?, next })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_two_ahead_stay_inside_document_and_sequence() {
        // Documents [1 2 3 end] [4 ...: the end token has no target, the token before it predicts the end.
        let targets = [2, 3, 256, NONE, 5, 6, /* next sequence */ 8, 9, 10, 11, 12, 13];
        let expected = [3, 256, NONE, NONE, 6, NONE, 9, 10, 11, 12, 13, NONE];
        assert_eq!(next_targets(&targets, 6), expected);
    }
}
