//! The validation loss, while training and of a checkpoint.

use dropless_core::Backend;
use dropless_model::Model;
use dropless_model::hf::WeightFiles;
use dropless_model::nn::Tokens;

use super::notice::Notice;
use super::{inputs, ranks, state, step};
use crate::collective::away;
use crate::config::Config;
use crate::data::{self, Corpus};
use crate::error::Result;
use crate::options::TrainOptions;

/// The loss on the validation text.
#[derive(Clone, Copy, Debug)]
pub struct Validation {
    /// In nats per token.
    pub loss: f64,
    /// Entropy of the text when every byte is drawn on its own, in nats per byte.
    pub unigram: f64,
}

/// The loss of these weights on the whole validation text of `config`; None where the first rank lives in another process.
///
/// # Errors
/// A configuration or text that does not fit, tensors that cannot be read, and failures of the ranks.
pub fn evaluate(config: &Config, weights: &WeightFiles, options: &TrainOptions) -> Result<Option<Validation>> {
    config.check(options.ranks, options.expert_ranks())?;
    config.check_data()?;
    let (_, validation) = Corpus::load(config)?;
    let loss = ranks::run(options.open_ranks(config.train.numerics.into())?, |backend| {
        let tokens = inputs::tokens(backend, config)?;
        let mut model = Model::new(backend, &config.model.architecture(), &config.inference(), &tokens)?;
        away(&[backend], || state::load(backend, &mut model, weights, None))?;
        let loss = mean_loss(backend, config, &tokens, &model, &validation, 0, &mut Undisturbed)?;
        Ok(loss.unwrap_or_else(|| unreachable!("nobody broke it off")))
    })?;
    Ok(loss.map(|loss| Validation { loss, unigram: validation.unigram_entropy() }))
}

/// What goes on beside a validation.
pub(super) trait Beside {
    /// This rank's notice.
    fn notice(&mut self) -> Result<Notice>;

    /// Takes in the notices of all ranks; whether the validation goes on.
    fn goes_on(&mut self, notices: &[Notice]) -> Result<bool>;
}

/// Nothing goes on beside it.
struct Undisturbed;

impl Beside for Undisturbed {
    fn notice(&mut self) -> Result<Notice> {
        Ok(Notice::default())
    }

    fn goes_on(&mut self, _notices: &[Notice]) -> Result<bool> {
        Ok(true)
    }
}

/// The mean loss over that many batches of the text, or over all of it for 0, in nats per token; the same on every rank.
/// None if it was broken off.
pub(super) fn mean_loss(
    backend: &dyn Backend,
    config: &Config,
    tokens: &Tokens,
    model: &Model,
    text: &Corpus,
    batches: usize,
    beside: &mut dyn Beside,
) -> Result<Option<f64>> {
    let train = &config.train;
    let limit = if batches == 0 { usize::MAX } else { batches };
    let (mut sum, mut count) = (0.0, 0);
    for batch in data::validation(text, train.sequence_length, train.micro_batch_size)?.take(limit) {
        let batch = batch?;
        let (loss, notices) = step::evaluate(backend, config, tokens, model, &batch, beside.notice()?)?;
        if !beside.goes_on(&notices)? {
            return Ok(None);
        }
        sum += f64::from(loss);
        count += batch.valid;
    }
    Ok(Some(sum / count.max(1) as f64))
}
