//! The configuration: every key, its type and its meaning. `configs/default.toml` holds the defaults, with comments.
//!
//! [`Config::load`] reads a file and overrides (`load.rs`), [`Config::check`] verifies it as a whole (`check.rs`),
//! [`ModelConfig`] and its families are those of [`dropless_model`].

mod check;
mod data;
mod load;

use serde::{Deserialize, Serialize};

use dropless_core::NumericModel;

pub use data::{DataConfig, Format, Set, Source, Tokenizer, ValidationEntry};
pub use dropless_model::moe::Recipe;
pub use dropless_model::nn::{LinearRecipe, Policy};
pub use dropless_model::{Activations, ModelConfig, single};

use dropless_model::Options;
use dropless_model::hf::SpecialTokens;
use dropless_model::optimizer::AdamWConfig;

/// Everything that a run depends on, except where it runs ([`crate::options::TrainOptions`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The architecture.
    pub model: ModelConfig,
    /// The training run.
    pub train: TrainConfig,
    /// How a Mixture-of-Experts layer processes its tokens.
    pub moe: MoeConfig,
    /// What is done with saved activations.
    pub activations: Activations,
    /// The text.
    pub data: DataConfig,
    /// Where the initial weights come from, if the run does not draw its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

/// A model directory that a run starts from. The run's checkpoints do not need it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// Its path.
    pub directory: String,
    /// Its special tokens, which the run's checkpoints have, too.
    pub tokens: SpecialTokens,
}

/// The training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Arithmetic of the matrix products.
    pub numerics: Numerics,
    /// Element type, and precision of the operands of the expert products.
    pub recipe: Recipe,
    /// Precision of the operands of the other linear layers.
    pub linear_recipe: LinearRecipe,
    /// Number of optimizer steps.
    pub steps: u64,
    /// Sequences per step, over all ranks.
    pub batch_size: usize,
    /// Sequences per micro-batch, over all ranks.
    pub micro_batch_size: usize,
    /// Tokens per sequence.
    pub sequence_length: usize,
    /// Pieces of a micro-batch whose gradients are added along a tree (NUMERICS.md, "Sums").
    pub grad_shards: usize,
    /// The one seed.
    pub seed: u64,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Final learning rate.
    pub min_learning_rate: f64,
    /// The learning rate schedule.
    pub schedule: Schedule,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// Steps of decay of `wsd`.
    pub decay_steps: u64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Epsilon, added to the root of the second moment.
    pub eps: f64,
    /// Norm to which larger gradients are clipped; 0 for no clipping.
    pub max_grad_norm: f64,
    /// Step of the selection bias, for auxiliary-loss-free balancing; 0 for none.
    pub bias_update_rate: f64,
    /// Coefficient of the sequence-wise auxiliary loss; 0 for none.
    pub aux_loss_coefficient: f64,
    /// Coefficient of the multi-token-prediction loss.
    pub mtp_loss_coefficient: f64,
    /// Steps between validations; 0 for one at the end only.
    pub eval_interval: u64,
    /// Batches of a validation; 0 for the whole validation set.
    pub eval_batches: usize,
    /// Steps between checkpoints; 0 for one at the end only.
    pub checkpoint_interval: u64,
    /// Number of checkpoints to keep; 0 for all.
    pub keep_checkpoints: usize,
    /// Steps between lines of progress.
    pub log_interval: u64,
    /// Tokens of the sample at the end of a run; 0 for none.
    pub sample_tokens: usize,
}

/// The arithmetic of the matrix products, as a configuration names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Numerics {
    /// Sequential f32 fma.
    F32,
    /// NVIDIA Hopper, measured.
    Hopper,
    /// NVIDIA Blackwell, unverified.
    Blackwell,
}

impl From<Numerics> for NumericModel {
    fn from(numerics: Numerics) -> NumericModel {
        match numerics {
            Numerics::F32 => NumericModel::F32,
            Numerics::Hopper => NumericModel::Hopper,
            Numerics::Blackwell => NumericModel::Blackwell,
        }
    }
}

/// The learning rate schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Warm-up, then half a cosine.
    Cosine,
    /// Warm-up, stable, decay.
    Wsd,
}

/// How a Mixture-of-Experts layer processes its tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeConfig {
    /// Number of pieces.
    pub chunks: usize,
    /// Pieces of a micro-batch whose expert gradients are added along a tree (NUMERICS.md, "Sums").
    pub expert_shards: usize,
    /// Limit on the worst case of a piece, in MiB; 0 for no limit.
    pub memory_budget_mb: u64,
}

impl Config {
    /// How the model computes in training.
    pub fn options(&self) -> Options {
        Options {
            recipe: self.train.recipe,
            linear_recipe: self.train.linear_recipe,
            chunks: self.moe.chunks,
            memory_budget: match self.moe.memory_budget_mb {
                0 => u64::MAX,
                mb => mb.saturating_mul(1 << 20),
            },
            balance_coefficient: self.train.aux_loss_coefficient / self.train.batch_size as f64,
            activations: self.activations,
            training: true,
        }
    }

    /// The special tokens of what a run on bytes writes: those of its origin, or the end of a document.
    pub fn special_tokens(&self) -> SpecialTokens {
        match &self.origin {
            Some(origin) => origin.tokens.clone(),
            None => SpecialTokens { bos: None, eos: vec![crate::data::END], pad: None },
        }
    }

    /// How the model computes without training.
    pub fn inference(&self) -> Options {
        Options { training: false, ..self.options() }
    }
}

impl TrainConfig {
    /// The optimizer's hyperparameters.
    pub fn adamw(&self) -> AdamWConfig {
        AdamWConfig {
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
            bias_update_rate: self.bias_update_rate,
        }
    }

    /// Tokens per step, over all ranks.
    pub fn tokens(&self) -> usize {
        self.batch_size * self.sequence_length
    }
}
