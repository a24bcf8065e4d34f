//! Training steps that leave nothing behind but their digest: to compare backends and settings.

use std::sync::Arc;

use dropless_core::Backend;
use dropless_model::{Model, optimizer};

use super::notice::Notice;
use super::{StepResult, inputs, ranks, state, step};
use crate::checkpoint::digest;
use crate::collective::{away, gather_bytes, said};
use crate::config::Config;
use crate::data::{Batch, Mixture, Position, Stream, Texts};
use crate::error::Result;
use crate::options::TrainOptions;
use crate::schedule;

/// Trains from the initial weights, without files; returns the digest of weights and optimizer state, or None where the
/// first rank lives in another process.
///
/// # Errors
/// A configuration or text that does not fit, and failures of the ranks.
pub fn steps_in_memory(config: &Config, options: &TrainOptions, steps: u64) -> Result<Option<String>> {
    config.check(options.ranks, options.expert_ranks())?;
    config.check_initial()?;
    config.check_data()?;
    let train = Texts::load(config)?.train;
    let ranks = options.open_ranks(config.train.numerics.into())?;
    ranks::run(ranks, |backend| on_rank(backend, config, train.clone(), steps, |_| Ok(())))
}

/// Where the steps of a rank are.
#[cfg_attr(not(feature = "wgpu"), expect(dead_code, reason = "only recordings look"))]
pub(super) enum At<'a> {
    /// A step begins.
    Step(u64),
    /// The gradients of a batch are there, and the weights as they were.
    Gradients(&'a Batch, &'a StepResult),
    /// The last step is done, and the state is read back.
    End,
}

/// The steps of one rank; `at` is told where they are.
pub(super) fn on_rank(
    backend: &dyn Backend,
    config: &Config,
    text: Arc<Mixture>,
    steps: u64,
    mut at: impl FnMut(At<'_>) -> Result<()>,
) -> Result<String> {
    let train = &config.train;
    let tokens = inputs::tokens(backend, config)?;
    let mut model = Model::new(backend, &config.model.architecture(), &config.options(), &tokens)?;
    away(&[backend], || state::begin(backend, &mut model, config))?;
    let mut stream = Stream::new(text, train.sequence_length, train.seed, Position::default())?;
    for step in 1..=steps {
        at(At::Step(step))?;
        let batch = stream.next_batch(train.batch_size)?;
        let (result, gradients, counts) = step::gradients(backend, config, &tokens, &model, &batch, Notice::default())?;
        at(At::Gradients(&batch, &result))?;
        optimizer::update(
            backend,
            &mut model,
            &train.adamw(),
            &gradients,
            &counts,
            schedule::step_numbers(train, step),
        )?;
    }
    at(At::End)?;
    let mut mine: Vec<(String, [u8; 32])> = Vec::new();
    for (head, tensor) in state::part(backend.caps(), &model)?.into_iter().flatten() {
        let values = backend.download::<f32>(&tensor)?;
        mine.push((head.name.clone(), *head.hasher().update(bytemuck::cast_slice(&values)).finalize().as_bytes()));
    }
    let mine = serde_json::to_vec(&mine).unwrap_or_else(|e| unreachable!("plain data: {e}"));
    let mut hashes: Vec<(String, [u8; 32])> = Vec::new();
    for (rank, theirs) in gather_bytes(backend, &mine)?.iter().enumerate() {
        let theirs = serde_json::from_slice::<Vec<_>>(theirs);
        hashes.extend(theirs.map_err(|error| said(backend, rank, &format!("brings no hashes: {error}")))?);
    }
    Ok(digest(hashes))
}
