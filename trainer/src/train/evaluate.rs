//! The validation loss, while training and of a checkpoint.

use dropless_core::Backend;
use dropless_model::Model;
use dropless_model::nn::Tokens;
use serde::{Deserialize, Serialize};

use super::notice::Notice;
use super::{inputs, ranks, state, step};
use crate::collective::away;
use crate::config::Config;
use crate::data::{self, Corpus, Texts};
use crate::error::Result;
use crate::options::TrainOptions;
use crate::progress::Validating;
use crate::source::Source;

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

/// The loss of a model on each whole validation set of its configuration; None where the first rank lives in another
/// process.
///
/// # Errors
/// A configuration or text that does not fit, tensors that cannot be read, and failures of the ranks.
pub fn evaluate(source: Source, options: &TrainOptions) -> Result<Option<Vec<Validation>>> {
    let Source { config, weights, tokenizer, .. } = source;
    let config = &config;
    config.check(options.ranks, options.expert_ranks())?;
    config.check_data()?;
    let texts = Texts::with(config, tokenizer)?;
    let losses = ranks::run(options.open_ranks(config.train.numerics.into())?, |backend| {
        let tokens = inputs::tokens(backend, config)?;
        let mut model = Model::new(backend, &config.model.architecture(), &config.inference(), &tokens)?;
        away(&[backend], || state::load(backend, &mut model, &weights, None))?;
        let shown = (backend.caps().rank == 0).then(Validating::alone);
        let losses = mean_losses(backend, config, &tokens, &model, &texts, 0, &mut Undisturbed(shown))?;
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
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mean {
    /// In nats per target.
    pub loss: f64,
    /// Targets that were counted.
    pub targets: usize,
}

/// The mean loss of each validation set over that many batches of it, or over all of it for 0, in nats per token; the
/// same on every rank. None if it was broken off.
pub(super) fn mean_losses(
    backend: &dyn Backend,
    config: &Config,
    tokens: &Tokens,
    model: &Model,
    texts: &Texts,
    batches: usize,
    beside: &mut dyn Beside,
) -> Result<Option<Vec<Mean>>> {
    let train = &config.train;
    let limit = if batches == 0 { usize::MAX } else { batches };
    let of_set = |(_, text): &'_ (String, Corpus)| {
        Ok(data::validation(text, train.sequence_length, train.micro_batch_size)?.take(limit).len())
    };
    let (all, mut done) = (texts.validation.iter().map(of_set).sum::<Result<usize>>()?, 0);
    let mut means = Vec::with_capacity(texts.validation.len());
    for (_, text) in &texts.validation {
        let (mut sum, mut count) = (0.0, 0);
        for batch in data::validation(text, train.sequence_length, train.micro_batch_size)?.take(limit) {
            let batch = batch?;
            let (loss, notices) = step::evaluate(backend, config, tokens, model, &batch, beside.notice()?)?;
            if !beside.goes_on(&notices)? {
                return Ok(None);
            }
            sum += f64::from(loss);
            count += batch.valid;
            done += 1;
            beside.reached(done, all);
        }
        means.push(Mean { loss: sum / count.max(1) as f64, targets: count });
    }
    Ok(Some(means))
}

/// What goes on beside a validation.
pub(super) trait Beside {
    /// This rank's notice.
    fn notice(&mut self) -> Result<Notice>;

    /// Takes in the notices of all ranks; whether the validation goes on.
    fn goes_on(&mut self, notices: &[Notice]) -> Result<bool>;

    /// So many batches are done, of so many.
    fn reached(&mut self, done: usize, of: usize);
}

/// Nothing goes on beside it; the first rank shows how far it is.
struct Undisturbed(Option<Validating>);

impl Beside for Undisturbed {
    fn notice(&mut self) -> Result<Notice> {
        Ok(Notice::default())
    }

    fn goes_on(&mut self, _notices: &[Notice]) -> Result<bool> {
        Ok(true)
    }

    fn reached(&mut self, done: usize, of: usize) {
        self.0.iter_mut().for_each(|shown| shown.reached(done, of));
    }
}
