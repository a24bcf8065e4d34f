//! The rules that values have to satisfy together. Each violation is one line that names fields and values.

use std::path::Path;

use dropless_model::Single;
use dropless_model::architecture::MoeConfig;

use super::{Config, LinearRecipe, ModelConfig, Recipe, Schedule, Tokenizer, TrainConfig, single};
use crate::error::{Error, Result};

/// The largest weight of a source.
const LARGE: f64 = 1e6;

fn need(ok: bool, message: impl FnOnce() -> String) -> Result<()> {
    if ok { Ok(()) } else { Err(Error::Config(message())) }
}

fn positive(fields: &[(&str, usize)]) -> Result<()> {
    fields.iter().try_for_each(|&(name, value)| need(value > 0, || format!("{name} is 0, expected at least 1")))
}

fn usable(limits: Single, name: &str, value: f64) -> Result<()> {
    limits.check(name, value).map_err(Error::Config)
}

/// A coefficient that becomes an f32 when it is divided among so many.
fn shared(among: usize) -> Single {
    Single { low: f32::MIN_POSITIVE * single(among as f64), ..Single::RATE }
}

/// Steps are counted in f64 by the schedule and in 63 bits by TOML.
const MOST_STEPS: u64 = 1 << 53;
/// Tokens are counted in 32 bits on the device.
const MOST_TOKENS: usize = 1 << 31;

impl Config {
    /// Verifies the whole configuration for a number of ranks, of which `expert_ranks` share one set of experts, before
    /// anything is allocated.
    ///
    /// # Errors
    /// [`Error::Config`] with the first rule that does not hold.
    pub fn check(&self, ranks: usize, expert_ranks: usize) -> Result<()> {
        self.model.check()?;
        self.train.check()?;
        let (model, train) = (self.model.architecture(), &self.train);
        let (names, moe) = (&model.names, model.moe());
        let (experts_key, experts) = (names.experts_key, moe.map_or(0, |moe| moe.experts));
        need(ranks > 0, || "--ranks is 0, expected at least 1".into())?;
        need(expert_ranks > 0 && ranks.is_multiple_of(expert_ranks), || {
            format!("--expert-parallel is {expert_ranks}, which does not divide --ranks, {ranks}")
        })?;
        need(experts.is_multiple_of(expert_ranks), || {
            format!(
                "model.{experts_key} is {experts}, which {expert_ranks} ranks do not divide (expert parallelism needs \
                 equal shares)"
            )
        })?;
        need(train.grad_shards.is_multiple_of(ranks), || {
            format!(
                "train.grad_shards is {}, which {ranks} ranks do not divide (each rank owns equally many shards)",
                train.grad_shards
            )
        })?;
        let (expert_shards, replicas) = (self.moe.expert_shards, ranks / expert_ranks);
        need(expert_shards.is_power_of_two(), || {
            format!("moe.expert_shards is {expert_shards}, expected a power of two")
        })?;
        need(train.grad_shards.is_multiple_of(expert_shards), || {
            format!(
                "moe.expert_shards is {expert_shards}, which does not divide train.grad_shards, {}",
                train.grad_shards
            )
        })?;
        need(expert_shards.is_multiple_of(replicas), || {
            format!(
                "moe.expert_shards is {expert_shards}, which {replicas} replicas of the experts do not divide (--ranks \
                 {ranks}, --expert-parallel {expert_ranks})"
            )
        })?;
        let (sequence, longest) = (train.sequence_length, model.max_positions);
        need(sequence <= longest, || {
            format!("train.sequence_length is {sequence}, but model.max_position_embeddings is {longest}")
        })?;
        if train.recipe == Recipe::Mxfp8 {
            for (name, value) in [("hidden_size", model.hidden), (names.width_key, moe.map_or(0, |moe| moe.width))] {
                need(value.is_multiple_of(32), || {
                    format!("model.{name} is {value}, but train.recipe \"mxfp8\" needs a multiple of its block of 32")
                })?;
            }
        }
        need(train.recipe != Recipe::F32 || train.linear_recipe == LinearRecipe::Bf16, || {
            "train.linear_recipe quantizes, but train.recipe is \"f32\", which is that of the whole model: leave \
             train.linear_recipe at \"bf16\""
                .into()
        })?;
        if train.linear_recipe == LinearRecipe::Mxfp8 {
            for (tensors, [n, k]) in model.linear_layers() {
                need(n.is_multiple_of(32) && k.is_multiple_of(32), || {
                    let name = tensors.join(" + ");
                    format!(
                        "{name} is [{n}, {k}], but train.linear_recipe \"mxfp8\" needs multiples of its block of 32"
                    )
                })?;
            }
        }
        // A model without experts has nothing to balance, whatever the rate.
        let unbiased = moe.is_some_and(|moe| !moe.selection_bias);
        need(!unbiased || train.bias_update_rate == 0.0, || {
            let family = self.model.family();
            format!(
                "train.bias_update_rate is {}, but {family} has no selection bias: set it to 0 and balance by \
                 train.aux_loss_coefficient",
                train.bias_update_rate
            )
        })?;
        positive(&[("moe.chunks", self.moe.chunks)])?;
        let shard = train.micro_batch_size / train.grad_shards * sequence;
        need(shard.is_multiple_of(self.moe.chunks), || {
            format!(
                "moe.chunks is {}, which does not divide the {shard} tokens of a gradient shard (train.micro_batch_size \
                 / train.grad_shards * train.sequence_length)",
                self.moe.chunks
            )
        })
    }

    /// Verifies `[data]` as far as that takes no file: what bytes need of the model, and that there is text to validate on.
    ///
    /// # Errors
    /// [`Error::Config`] with the first rule that does not hold.
    pub fn check_data(&self) -> Result<()> {
        let (data, vocab_size) = (&self.data, self.model.architecture().vocab);
        need(data.tokenizer != Tokenizer::Byte || vocab_size >= BYTE_VOCAB, || {
            format!(
                "model.vocab_size is {vocab_size}, but data.tokenizer \"byte\" needs at least {BYTE_VOCAB} (256 bytes and \
                 the end of a document)"
            )
        })?;
        let fraction = data.validation_fraction;
        need((0.0..1.0).contains(&fraction), || {
            format!("data.validation_fraction is {fraction:?}, expected 0 up to 1")
        })?;
        need(fraction > 0.0 || !data.validation.is_empty(), || {
            "data.validation_fraction is 0 and data.validation names no file, so there is nothing to validate on".into()
        })?;
        need(data.train.is_empty() || data.source.is_empty(), || {
            "data.train and data.source both name training text: give one of them".into()
        })?;
        for (at, source) in data.source.iter().enumerate() {
            need(!source.paths.is_empty(), || format!("data.source[{at}].paths is empty, expected globs of files"))?;
            let weight = source.weight;
            need(weight > 0.0 && weight <= LARGE, || {
                format!("data.source[{at}].weight is {weight:?}, expected more than 0 and at most {LARGE}")
            })?;
        }
        let sets = data.validation_sets();
        for (at, set) in sets.iter().enumerate() {
            let name = &set.name;
            need(!name.is_empty(), || "data.validation has a set without a name".into())?;
            need(!set.paths.is_empty(), || format!("data.validation {name:?} has no paths, expected globs of files"))?;
            need(sets[..at].iter().all(|other| other.name != *name), || {
                format!("data.validation has two sets named {name:?}")
            })?;
        }
        Ok(())
    }

    /// Verifies what only matters where weights are drawn.
    ///
    /// # Errors
    /// [`Error::Config`] for weights that would all be 0, of which no two would ever differ.
    pub fn check_initial(&self) -> Result<()> {
        let deviation = self.model.architecture().initializer_range;
        match self.origin {
            Some(_) => Ok(()),
            None => usable(Single::FACTOR, "model.initializer_range", deviation),
        }
    }

    /// What is allowed, and most likely not meant.
    pub fn warnings(&self) -> Vec<String> {
        let model = self.model.architecture();
        let (constant, coefficient) =
            (model.moe().is_some_and(MoeConfig::constant_weights), self.train.aux_loss_coefficient);
        let mut warnings = Vec::new();
        if constant && coefficient == 0.0 {
            let normalized =
                match ModelConfig::keys(self.model.family()).unwrap_or_default().contains(&"norm_topk_prob") {
                    true => "model.norm_topk_prob divides that expert's weight by itself",
                    false => "this family divides that expert's weight by itself",
                };
            warnings.push(format!(
                "warning: the gradient of every router is 0, so that routers learn nothing: model.num_experts_per_tok is 1, \
                 {normalized}, and train.aux_loss_coefficient is 0"
            ));
        }
        warnings
    }

    /// Verifies that the model is the one whose weights lie at `path`; only positions may be other ones.
    ///
    /// # Errors
    /// [`Error::Config`] names the first field that differs, with both values.
    pub fn check_model(&self, model: &ModelConfig, path: &Path) -> Result<()> {
        let theirs = Config { model: model.clone(), ..self.clone() };
        let (ours, theirs) = (self.settings(), theirs.settings());
        let differs = |a: &[(String, String)], b: &[(String, String)]| {
            a.iter().find(|entry| entry.0 != "model.max_position_embeddings" && !b.contains(entry)).cloned()
        };
        let differing = differs(&ours, &theirs).or_else(|| differs(&theirs, &ours));
        need(differing.is_none(), || {
            let (name, _) = differing.clone().unwrap_or_default();
            let value = |all: &[(String, String)]| {
                all.iter().find(|(n, _)| *n == name).map_or("absent".to_owned(), |(_, value)| value.clone())
            };
            format!("{name} is {}, but {} in the model of {}", value(&ours), value(&theirs), path.display())
        })
    }

    /// Verifies that a run that began as `self` may go on as `next`: every setting that affected results so far must be
    /// the same.
    ///
    /// # Errors
    /// [`Error::Config`] names the first field that differs, with both values.
    pub fn check_continues_as(&self, next: &Config) -> Result<()> {
        let (before, after) = (self.settings(), next.settings());
        for (name, old) in &before {
            let new = after.iter().find(|(n, _)| n == name).map_or("absent", |(_, v)| v);
            need(old == new || MAY_CHANGE.contains(&name.as_str()), || {
                format!("{name} is {new}, but the checkpoint was made with {old}")
            })?;
        }
        let added = after.iter().find(|(name, _)| !before.iter().any(|(n, _)| n == name));
        need(added.is_none(), || {
            let (name, value) = added.cloned().unwrap_or_default();
            format!("{name} is {value}, but the checkpoint was made without it")
        })
    }

    /// Every key with its path, and its value as TOML.
    fn settings(&self) -> Vec<(String, String)> {
        fn walk(value: &toml::Value, path: &str, out: &mut Vec<(String, String)>) {
            match value {
                toml::Value::Table(table) => {
                    for (key, value) in table {
                        walk(value, &if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, out);
                    }
                }
                leaf => out.push((path.to_owned(), leaf.to_string())),
            }
        }
        let mut out = Vec::new();
        if let Ok(value) = toml::Value::try_from(self) {
            walk(&value, "", &mut out);
        }
        out
    }
}

/// Ids of the byte tokenizer.
const BYTE_VOCAB: usize = 257;

/// Fields that change what a run does from here on, and nothing of what it did; or that no bit depends on. Where texts
/// and their tokenizer lie is such a field: what they are is compared by hash ([`crate::data::TextRecord`]).
const MAY_CHANGE: &[&str] = &[
    "train.steps",
    "train.learning_rate",
    "train.min_learning_rate",
    "train.schedule",
    "train.warmup_steps",
    "train.decay_steps",
    "train.eval_interval",
    "train.eval_batches",
    "train.checkpoint_interval",
    "train.keep_checkpoints",
    "train.log_interval",
    "train.sample_tokens",
    "moe.memory_budget_mb",
    "activations.attention_input",
    "activations.qkv",
    "activations.attention_output",
    "activations.mlp_input",
    "activations.dispatched",
    "activations.gate_up",
    "activations.expert_hidden",
    "data.train",
    "data.source",
    "data.validation",
    "data.tokenizer",
];

impl TrainConfig {
    fn check(&self) -> Result<()> {
        positive(&[
            ("train.batch_size", self.batch_size),
            ("train.micro_batch_size", self.micro_batch_size),
            ("train.sequence_length", self.sequence_length),
            ("train.grad_shards", self.grad_shards),
        ])?;
        need(self.steps <= MOST_STEPS, || format!("train.steps is {}, expected at most {MOST_STEPS}", self.steps))?;
        let (sequences, length) = (self.batch_size, self.sequence_length);
        need(sequences.checked_mul(length).is_some_and(|tokens| tokens <= MOST_TOKENS), || {
            format!(
                "train.batch_size is {sequences} and train.sequence_length is {length}, expected at most {MOST_TOKENS} \
                 tokens in a step"
            )
        })?;
        need(self.log_interval > 0, || "train.log_interval is 0, expected at least 1".into())?;
        let (batch, micro, shards) = (self.batch_size, self.micro_batch_size, self.grad_shards);
        need(batch.is_multiple_of(micro), || {
            format!("train.micro_batch_size is {micro}, which does not divide train.batch_size, {batch}")
        })?;
        need(shards.is_power_of_two(), || format!("train.grad_shards is {shards}, expected a power of two"))?;
        need(micro.is_multiple_of(shards), || {
            format!("train.grad_shards is {shards}, which does not divide train.micro_batch_size, {micro}")
        })?;
        usable(Single::RATE, "train.learning_rate", self.learning_rate)?;
        usable(Single::RATE, "train.min_learning_rate", self.min_learning_rate)?;
        let (low, peak) = (self.min_learning_rate, self.learning_rate);
        need(low <= peak, || format!("train.min_learning_rate is {low}, expected 0 to train.learning_rate, {peak}"))?;
        if self.schedule == Schedule::Wsd {
            let (warm, decay, steps) = (self.warmup_steps, self.decay_steps, self.steps);
            need(warm.saturating_add(decay) <= steps, || {
                format!("train.warmup_steps {warm} and train.decay_steps {decay} exceed train.steps, {steps}")
            })?;
        }
        usable(Single::RATE, "train.weight_decay", self.weight_decay)?;
        usable(Single::DECAY, "train.beta1", self.beta1)?;
        usable(Single::DECAY, "train.beta2", self.beta2)?;
        // A weight that never had a gradient is divided by it alone.
        usable(Single { high: 1.0, ..Single::FACTOR }, "train.eps", self.eps)?;
        usable(Single::RATE, "train.max_grad_norm", self.max_grad_norm)?;
        usable(Single::RATE, "train.bias_update_rate", self.bias_update_rate)?;
        usable(shared(sequences), "train.aux_loss_coefficient", self.aux_loss_coefficient)?;
        usable(shared(self.tokens()), "train.mtp_loss_coefficient", self.mtp_loss_coefficient)
    }
}
