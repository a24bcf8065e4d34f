//! The configuration: every key, its type and its meaning. `configs/default.toml` holds the defaults, with comments.
//!
//! [`Config::load`] reads a file and overrides (`load.rs`), [`Config::check`] verifies it as a whole (`check.rs`),
//! [`ModelConfig::from_hf`] and [`ModelConfig::to_hf`] speak the Hugging Face form of a model (`hf.rs`).

mod check;
mod hf;
mod load;

use serde::{Deserialize, Serialize};

use dropless_core::NumericModel;

/// Everything that a run depends on, but for where it runs ([`crate::options::TrainOptions`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The architecture.
    pub model: ModelConfig,
    /// The training run.
    pub train: TrainConfig,
    /// How a mixture-of-experts layer walks its tokens.
    pub moe: MoeConfig,
    /// What becomes of saved activations.
    pub activations: Activations,
    /// The text.
    pub data: DataConfig,
}

/// The DeepSeek-V3 architecture, in the names of its Hugging Face `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Width of a dense layer's MLP.
    pub intermediate_size: usize,
    /// Width of an expert, I.
    pub moe_intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// The first layers that are dense.
    pub first_k_dense_replace: usize,
    /// Number of attention heads.
    pub num_attention_heads: usize,
    /// Rank of the query projection; 0 for a plain `q_proj`.
    pub q_lora_rank: usize,
    /// Rank of the key and value projection.
    pub kv_lora_rank: usize,
    /// Elements of a query or key without position.
    pub qk_nope_head_dim: usize,
    /// Elements of a query or key with rotary position.
    pub qk_rope_head_dim: usize,
    /// Elements of a value.
    pub v_head_dim: usize,
    /// Number of experts, E.
    pub n_routed_experts: usize,
    /// Experts that every token visits, as one MLP of `n_shared_experts * moe_intermediate_size`; 0 for none.
    pub n_shared_experts: usize,
    /// Experts of a token, K.
    pub num_experts_per_tok: usize,
    /// Groups of experts.
    pub n_group: usize,
    /// Groups that a token may choose from.
    pub topk_group: usize,
    /// Function from logits to scores.
    pub scoring_func: ScoringFunc,
    /// Whether a token's weights are divided by their sum.
    pub norm_topk_prob: bool,
    /// Factor of the weights.
    pub routed_scaling_factor: f64,
    /// Added to the mean square in norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Multi-token-prediction modules, 0 or 1.
    pub num_nextn_predict_layers: usize,
    /// Context extension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScoringFunc {
    /// Each on its own.
    Sigmoid,
    /// Over all experts.
    Softmax,
}

/// Context extension by YaRN (arXiv 2309.00071).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// The method.
    #[serde(rename = "type")]
    pub method: RopeMethod,
    /// New length over original length.
    pub factor: f64,
    /// Original length.
    pub original_max_position_embeddings: usize,
    /// Rotations above which a frequency is left alone.
    #[serde(default = "thirty_two")]
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by the factor.
    #[serde(default = "one")]
    pub beta_slow: f64,
    /// Attention temperature of the rotary part.
    #[serde(default = "one")]
    pub mscale: f64,
    /// Attention temperature of all of it.
    #[serde(default)]
    pub mscale_all_dim: f64,
}

fn one() -> f64 {
    1.0
}

fn thirty_two() -> f64 {
    32.0
}

/// The methods of [`RopeScaling`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeMethod {
    /// YaRN.
    Yarn,
}

/// The training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Arithmetic of the matrix products.
    pub numerics: Numerics,
    /// Precision of the operands.
    pub recipe: Recipe,
    /// Number of optimizer steps.
    pub steps: u64,
    /// Sequences of a step, over all ranks.
    pub batch_size: usize,
    /// Sequences of a micro-step, over all ranks.
    pub micro_batch_size: usize,
    /// Tokens of a sequence.
    pub sequence_length: usize,
    /// Pieces of a micro-step whose gradients are added along a tree (NUMERICS.md, "Sums").
    pub grad_shards: usize,
    /// The one seed.
    pub seed: u64,
    /// Largest learning rate.
    pub learning_rate: f64,
    /// Last learning rate.
    pub min_learning_rate: f64,
    /// The course of the learning rate.
    pub schedule: Schedule,
    /// Steps of linear rise.
    pub warmup_steps: u64,
    /// Steps of decay of `wsd`.
    pub decay_steps: u64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Norm to which larger gradients are scaled; 0 for none.
    pub max_grad_norm: f64,
    /// Step of the selection bias; 0 for none.
    pub bias_update_rate: f64,
    /// Factor of the sequence-wise auxiliary loss; 0 for none.
    pub aux_loss_coefficient: f64,
    /// Factor of the multi-token-prediction loss.
    pub mtp_loss_coefficient: f64,
    /// Steps between validations; 0 for one at the end only.
    pub eval_interval: u64,
    /// Batches of a validation; 0 for the whole validation set.
    pub eval_batches: usize,
    /// Steps between checkpoints; 0 for one at the end only.
    pub checkpoint_interval: u64,
    /// Checkpoints that stay; 0 for all.
    pub keep_checkpoints: usize,
    /// Steps between lines of progress.
    pub log_interval: u64,
    /// Tokens of the text that a finished run shows; 0 for none.
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

/// The precision of operands. Master weights, gradients and optimizer state are f32 in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recipe {
    /// Everything f32.
    F32,
    /// Weights and activations bf16.
    Bf16,
    /// The experts' products in MXFP8, the rest as `Bf16`.
    Mxfp8,
    /// The experts' products in FP8 blocks, the rest as `Bf16`.
    Fp8Block,
}

/// The course of the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Warm-up, then half a cosine.
    Cosine,
    /// Warm-up, stable, decay.
    Wsd,
}

/// How a mixture-of-experts layer walks its tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeConfig {
    /// Number of pieces.
    pub chunks: usize,
    /// Pieces of a micro-step whose expert gradients are added along a tree (NUMERICS.md, "Sums").
    pub expert_shards: usize,
    /// Largest worst case of a piece, in 2^20 bytes; 0 for no limit.
    pub memory_budget_mb: u64,
}

/// What becomes of each class of saved activations between forward and backward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Activations {
    /// The normalised input of attention.
    pub attention_input: Policy,
    /// Queries, keys and values.
    pub qkv: Policy,
    /// The result of attention before the output projection.
    pub attention_output: Policy,
    /// The normalised input of the MLP or the experts.
    pub mlp_input: Policy,
    /// The rows that the experts of this rank received.
    pub dispatched: Policy,
    /// Gate and up projections.
    pub gate_up: Policy,
    /// Input of the down projection.
    pub expert_hidden: Policy,
}

/// What becomes of a saved activation. No bit depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// It stays in device memory.
    Keep,
    /// It moves to host memory and back.
    Offload,
    /// It is dropped and computed again.
    Recompute,
}

/// The text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Globs of text files; empty for the embedded corpus.
    pub train: Vec<String>,
    /// Globs of validation files; empty to set a part of the training text aside.
    pub validation: Vec<String>,
    /// That part.
    pub validation_fraction: f64,
    /// How text becomes ids.
    pub tokenizer: Tokenizer,
}

/// How text becomes ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tokenizer {
    /// Bytes are ids 0..255; 256 ends a document.
    Byte,
}

impl Activations {
    /// Everything stays in device memory.
    pub const KEEP: Activations = Activations {
        attention_input: Policy::Keep,
        qkv: Policy::Keep,
        attention_output: Policy::Keep,
        mlp_input: Policy::Keep,
        dispatched: Policy::Keep,
        gate_up: Policy::Keep,
        expert_hidden: Policy::Keep,
    };
}

impl TrainConfig {
    /// Tokens of a step, over all ranks.
    pub fn tokens(&self) -> usize {
        self.batch_size * self.sequence_length
    }
}

/// A configured number as the f32 that the ops take, rounded once.
#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest f32 is what is meant")]
pub fn single(x: f64) -> f32 {
    x as f32
}
