//! A model directory of another framework, computed here: logits, loss and the gradient of every parameter.

use std::path::Path;

use dropless_core::ops::NONE;
use dropless_core::{Backend, DType, Group, NumericModel};

use super::inputs::{Scales, tokens, upload};
use super::notice::Notice;
use super::{ranks, state, step};
use dropless_model::architecture::Feed;
use dropless_model::collective::gather;
use dropless_model::hf::{HfConfig, ModelDir, TensorFiles, WeightFiles, layout};
use dropless_model::{Architecture, Model};

use crate::collective::away;
use crate::config::{Activations, Config, LinearRecipe, Recipe};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::options::TrainOptions;
use crate::output;

/// Tensors by name.
pub type Named = Vec<(String, Vec<f32>)>;

/// What a model gives for the token ids of a reference.
#[derive(Clone, Debug)]
pub struct Computed {
    /// `logits.f32`, `loss.f32` and `grad.*`.
    pub tensors: Named,
    /// Gradients that are zero in exact arithmetic: those of routers whose tokens choose one expert, with the weight 1.
    pub zero: Vec<String>,
}

/// Computes what `expected.safetensors` of a model directory holds: `logits.f32`, `loss.f32` and, if there is any,
/// `grad.*`. Without a gradient there, nothing is allocated for training.
///
/// The directory has `config.json`, `model.safetensors` and token ids `input_ids` `[sequences, tokens]` in
/// `expected.safetensors`. The loss is the mean cross-entropy of the next token. Experts' gradients come as the other
/// frameworks hold them, `experts.gate_up_proj` `[experts, 2 * i, h]` and `experts.down_proj` `[experts, h, i]`. None where
/// the first rank lives in another process.
///
/// # Errors
/// [`Error::Checkpoint`] for files that do not fit; those of the ops.
pub fn compute(dir: &Path, numerics: NumericModel, recipe: Recipe, options: &TrainOptions) -> Result<Option<Computed>> {
    let files = ModelDir::open(dir)?;
    if options.world.as_ref().is_none_or(|world| world.rank == 0) {
        files.notes().iter().for_each(output::tell);
    }
    let ModelDir { config: HfConfig { model, .. }, weights, .. } = files;
    let file = dir.join("expected.safetensors");
    let expected = TensorFiles::open_files(vec![file.clone()])?;
    let batch = batch(&expected, &file, model.architecture().vocab)?;
    let with_gradients = expected.names().any(|name| name.starts_with(GRADIENT));
    let mut config = Config::load(None, &[])?;
    config.model = model;
    config.activations = Activations::default();
    config.train.recipe = recipe;
    config.train.linear_recipe = LinearRecipe::Bf16;
    config.train.aux_loss_coefficient = 0.0;
    config.train.bias_update_rate = 0.0;
    config.train.mtp_loss_coefficient = 0.0;
    config.train.sequence_length = batch.sequence;
    config.train.batch_size = batch.sequences();
    config.train.micro_batch_size = batch.sequences();
    config.train.grad_shards = options.ranks;
    config.moe.chunks = 1;
    config.moe.expert_shards = options.ranks / options.expert_ranks().max(1);
    if !batch.sequences().is_multiple_of(options.ranks) {
        let (sequences, ranks) = (batch.sequences(), options.ranks);
        return Err(Error::Usage(format!("--ranks is {ranks}, which does not divide the {sequences} sequences")));
    }
    config.check(options.ranks, options.expert_ranks())?;

    let ranks = options.open_ranks(numerics)?;
    let tensors = ranks::run(ranks, |backend| on_rank(backend, &config, &weights, &batch, with_gradients))?;
    Ok(tensors.map(|tensors| Computed { tensors, zero: zero(&config.model.architecture()) }))
}

/// The gradients that are zero in exact arithmetic.
fn zero(parts: &Architecture) -> Vec<String> {
    let constant = |feed: &Feed| matches!(feed, Feed::Moe(moe) if moe.constant_weights());
    let routers = parts.feeds().enumerate().filter(|(_, feed)| constant(feed));
    let router = |layer| format!("model.layers.{layer}.{}.gate.weight", parts.names.moe);
    routers.map(|(layer, _)| format!("{GRADIENT}{}", layout::fused(&parts.names, &router(layer)))).collect()
}

const LOGITS: &str = "logits.f32";
/// More ids than any comparison needs.
const MOST_IDS: usize = 1 << 22;
const LOSS: &str = "loss.f32";
/// What the name of a gradient begins with.
pub(crate) const GRADIENT: &str = "grad.";

fn on_rank(
    backend: &dyn Backend,
    config: &Config,
    weights: &WeightFiles,
    batch: &Batch,
    with_gradients: bool,
) -> Result<Named> {
    let (rank, ranks) = (backend.caps().rank, backend.caps().ranks);
    let tokens = tokens(backend, config)?;
    let parts = config.model.architecture();
    let model_options = if with_gradients { config.options() } else { config.inference() };
    let mut model = Model::new(backend, &parts, &model_options, &tokens)?;
    away(&[backend], || state::load(backend, &mut model, weights, None))?;
    let share = batch.share(batch.sequences(), 0, rank, ranks);
    let scales = Scales::new(batch, None);
    let inputs = upload(backend, share, batch.sequence, scales)?;
    let logits = backend.download(&model.logits(backend, &tokens, &inputs)?)?;
    let mut out = vec![(LOGITS.to_owned(), logits)];
    if with_gradients {
        let (result, gradients, _) = step::gradients(backend, config, &tokens, &model, batch, Notice::default())?;
        out.push((LOSS.to_owned(), vec![result.loss]));
        for (name, gradient) in gradients.sums.by_name(&model.params)? {
            let name = format!("{GRADIENT}{}", layout::fused(&parts.names, &name));
            let values = backend.download::<f32>(&gradient)?;
            match out.iter_mut().find(|(n, _)| *n == name) {
                Some((_, all)) => all.extend(values),
                None => out.push((name, values)),
            }
        }
    } else {
        let (sum, _) = step::evaluate(backend, config, &tokens, &model, batch, Notice::default())?;
        out.push((LOSS.to_owned(), vec![sum * scales.loss]));
    }
    for (name, values) in &mut out {
        // Sequences and experts of the ranks follow each other; the rest is the same on all of them.
        let group = match name {
            logits if logits == LOGITS => Group::World,
            expert if expert.contains(".experts.") => Group::Experts,
            _ => continue,
        };
        let mine = backend.upload(DType::F32, &[values.len()], values)?;
        *values = backend.download(&gather(backend, group, &mine)?)?;
    }
    Ok(out)
}

fn batch(expected: &TensorFiles, path: &Path, vocabulary: usize) -> Result<Batch> {
    let bad = |what: String| Error::checkpoint(path, what);
    let shape = expected.shape("input_ids")?;
    if shape.iter().try_fold(1, |count: usize, &n| count.checked_mul(n)).is_none_or(|count| count > MOST_IDS) {
        return Err(bad(format!("input_ids has shape {shape:?}, expected at most {MOST_IDS} ids")));
    }
    let ids = expected.ids("input_ids")?;
    let sequence = match *shape {
        [_, tokens] if tokens > 0 => tokens,
        _ => return Err(bad(format!("input_ids has shape {shape:?}, expected [sequences, tokens]"))),
    };
    if let Some(at) = ids.iter().position(|&id| id as usize >= vocabulary) {
        return Err(bad(format!("input_ids[{at}] is {}, outside the vocabulary of {vocabulary}", ids[at])));
    }
    let mut batch = Batch { ids, ..Batch::new(sequence) };
    let position = |at: usize| u32::try_from(at % sequence).expect("a sequence is shorter than 2^32");
    let tokens = batch.ids.len();
    batch.positions = (0..tokens).map(position).collect();
    batch.start = vec![0; tokens];
    let last = |at: usize| (at + 1).is_multiple_of(sequence);
    batch.targets = (0..tokens).map(|at| if last(at) { NONE } else { batch.ids[at + 1] }).collect();
    batch.valid = (0..tokens).filter(|&at| !last(at)).count();
    Ok(batch)
}
