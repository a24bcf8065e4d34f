//! The validation loss, while training and of a checkpoint.

use dropless_core::Backend;
use dropless_model::Model;
use dropless_model::hf::WeightFiles;
use dropless_model::nn::Tokens;

use super::notice::Notice;
use super::{inputs, ranks, state, step};
use crate::collective::away;
use crate::config::Config;
use crate::data::{self, Corpus, Texts};
use crate::error::Result;
use crate::options::TrainOptions;

/// The loss on a validation set.
#[derive(Clone, Debug, PartialEq)]
pub struct Validation {
    /// The set.
    pub name: String,
    /// In nats per target.
    pub loss: f64,
    /// Targets that were counted.
    pub targets: usize,
    /// Entropy of the text when every token is drawn on its own, in nats per token.
    pub unigram: f64,
    /// What a token is: a byte, or a token.
    pub unit: &'static str,
}

/// The mean loss over the targets of all sets, in nats.
pub fn overall(sets: &[Validation]) -> f64 {
    match sets {
        [set] => set.loss,
        _ => {
            let targets: usize = sets.iter().map(|set| set.targets).sum();
            sets.iter().map(|set| set.loss * set.targets as f64).sum::<f64>() / targets.max(1) as f64
        }
    }
}

/// The loss of these weights on each whole validation set of `config`; None where the first rank lives in another process.
///
/// # Errors
/// A configuration or text that does not fit, tensors that cannot be read, and failures of the ranks.
pub fn evaluate(config: &Config, weights: &WeightFiles, options: &TrainOptions) -> Result<Option<Vec<Validation>>> {
    config.check(options.ranks, options.expert_ranks())?;
    config.check_data()?;
    let texts = Texts::load(config)?;
    let losses = ranks::run(options.open_ranks(config.train.numerics.into())?, |backend| {
        let tokens = inputs::tokens(backend, config)?;
        let mut model = Model::new(backend, &config.model.architecture(), &config.inference(), &tokens)?;
        away(&[backend], || state::load(backend, &mut model, weights, None))?;
        let losses = mean_losses(backend, config, &tokens, &model, &texts, 0, &mut Undisturbed)?;
        Ok(losses.unwrap_or_else(|| unreachable!("nobody broke it off")))
    })?;
    Ok(losses.map(|losses| described(&texts, losses)))
}

/// The losses of [`mean_losses`] with the sets they are of.
pub(super) fn described(texts: &Texts, losses: Vec<Mean>) -> Vec<Validation> {
    let set = |((name, text), mean): (&(String, Corpus), Mean)| Validation {
        name: name.clone(),
        loss: mean.loss,
        targets: mean.targets,
        unigram: text.unigram_entropy(),
        unit: texts.tokenizer.unit(),
    };
    texts.validation.iter().zip(losses).map(set).collect()
}

/// The mean loss over targets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mean {
    pub(super) loss: f64,
    pub(super) targets: usize,
}

/// [`mean_loss`] of each validation set; None if it was broken off.
pub(super) fn mean_losses(
    backend: &dyn Backend,
    config: &Config,
    tokens: &Tokens,
    model: &Model,
    texts: &Texts,
    batches: usize,
    beside: &mut dyn Beside,
) -> Result<Option<Vec<Mean>>> {
    let mean =
        |(_, text): &(String, Corpus)| mean_loss(backend, config, tokens, model, text, batches, beside).transpose();
    texts
        .validation
        .iter()
        .map_while(mean)
        .collect::<Result<Vec<_>>>()
        .map(|means| (means.len() == texts.validation.len()).then_some(means))
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
fn mean_loss(
    backend: &dyn Backend,
    config: &Config,
    tokens: &Tokens,
    model: &Model,
    text: &Corpus,
    batches: usize,
    beside: &mut dyn Beside,
) -> Result<Option<Mean>> {
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
    Ok(Some(Mean { loss: sum / count.max(1) as f64, targets: count }))
}
