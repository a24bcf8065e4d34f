//! Cross-entropy on tiles of tokens.

use rayon::prelude::*;

use super::{Fast, Simd};
use crate::error::Result;
use crate::host::memory::{self, Floats, FloatsMut, RowMut};
use crate::host::simd;
use crate::ops::CrossEntropy;

impl Fast for CrossEntropy<'_> {
    fn run(&self, simd: Simd) -> Result<()> {
        const OP: &str = CrossEntropy::OP;
        let (logits, targets) = (memory::input(OP, self.logits)?, memory::input(OP, self.targets)?);
        let scale = memory::input(OP, self.scale)?.f32()[0];
        let (mut loss, mut d_logits) = (memory::output(OP, self.loss)?, memory::output_opt(OP, self.d_logits)?);
        let (logits, targets, vocabulary) = (logits.floats(), targets.u32(), self.logits.cols());

        let tile = memory::min_rows(vocabulary);
        let loss = loss.f32().par_chunks_mut(tile).enumerate();
        match &mut d_logits {
            Some(d_logits) => {
                loss.zip(d_logits.floats().pieces(tile * vocabulary)).for_each(|((t, loss), d)| {
                    simd::with(
                        simd,
                        #[inline(always)]
                        || tile_of_tokens(logits, targets, scale, t * tile, loss, Some(d)),
                    )
                });
            }
            None => loss.for_each(|(t, loss)| {
                simd::with(
                    simd,
                    #[inline(always)]
                    || tile_of_tokens(logits, targets, scale, t * tile, loss, None),
                )
            }),
        }
        Ok(())
    }
}

/// Tokens from `first` on, one for each element of `loss`.
#[inline(always)]
fn tile_of_tokens(
    logits: Floats<'_>,
    targets: &[u32],
    scale: f32,
    first: usize,
    loss: &mut [f32],
    d_logits: Option<FloatsMut<'_>>,
) {
    let vocabulary = logits.len() / targets.len();
    let (asked, mut d_logits) = (d_logits.is_some(), d_logits);
    let (mut x, mut exps) = (Vec::new(), Vec::new());
    for (i, loss) in loss.iter_mut().enumerate() {
        let (target, x) = (targets[first + i] as usize, logits.row(first + i, vocabulary, &mut x));
        let mut row = match &mut d_logits {
            Some(d_logits) => d_logits.row(i, vocabulary, &mut exps),
            None => {
                exps.resize(vocabulary, 0.0);
                RowMut::F32(&mut exps)
            }
        };
        if target >= vocabulary {
            *loss = 0.0;
            row.fill(0.0);
        } else {
            let (token_loss, sum) = CrossEntropy::row(x, target, &mut row);
            *loss = token_loss;
            if asked {
                CrossEntropy::grad_row(&mut row, sum, target, scale);
            }
        }
    }
}
