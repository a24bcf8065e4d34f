//! Mixtral (arXiv 2401.04088): grouped-query attention, every layer a Mixture-of-Experts layer, softmax over the chosen
//! experts (the same as over all, divided by the sum of the chosen).

use dropless_core::ops::{Pairs, Score};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Family;
use super::rules::{self, Check, positive};
use crate::architecture::{Architecture, Feed, MoeConfig};
use crate::attention::{AttentionConfig, gqa};
use crate::names::{MlpNames, Names};
use crate::rope::{Rope, Scaling};
use crate::single;

/// The keys of Mixtral.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mixtral {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// MLP width of an expert, I.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; equal to that of query heads if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<usize>,
    /// Elements of a head; hidden_size / num_attention_heads if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Number of experts, E.
    pub num_local_experts: usize,
    /// Experts per token, K.
    pub num_experts_per_tok: usize,
    /// Epsilon of the norms, added to the mean square.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether the embedding is also the output matrix.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Context extension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<Scaling>,
}

impl Mixtral {
    fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }
}

impl Family for Mixtral {
    const NAME: &'static str = "mixtral";
    const CLASS: &'static str = "MixtralForCausalLM";
    const TOKENS: (Option<u32>, Option<u32>) = (Some(1), Some(2));
    const SPELLINGS: &'static [(&'static str, &'static str)] = &[("num_local_experts", "num_experts")];

    const THETA: f64 = 1e6;

    fn absent() -> Vec<(&'static str, Value)> {
        vec![("num_key_value_heads", json!(8))]
    }

    fn fixed() -> Vec<(&'static str, Value)> {
        vec![("hidden_act", json!("silu")), ("sliding_window", Value::Null)]
    }

    fn check(&self) -> Check {
        rules::common!(self).check()?;
        positive(&[("head_dim", self.head_dim()), ("intermediate_size", self.intermediate_size)])?;
        rules::choice(("num_experts_per_tok", self.num_experts_per_tok), ("num_local_experts", self.num_local_experts))
    }

    fn architecture(&self) -> Architecture {
        let head_dim = self.head_dim();
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        let kv_heads = kv_heads.unwrap_or(heads);
        let attention = gqa::Config { heads, kv_heads, head_dim, qk_norm: false, pairs: Pairs::Halves };
        let moe = MoeConfig {
            experts: self.num_local_experts,
            top_k: self.num_experts_per_tok,
            width: self.intermediate_size,
            shared_width: None,
            score: Score::Softmax,
            groups: 1,
            top_groups: 1,
            normalize: true,
            scale: 1.0,
            selection_bias: false,
        };
        Architecture {
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            layers: vec![Feed::Moe(moe); self.num_hidden_layers],
            attention: AttentionConfig::Gqa(attention),
            rope: Rope {
                dim: head_dim,
                theta: self.rope_theta,
                scaling: self.rope_scaling.clone(),
                scaled_scores: false,
            },
            eps: single(self.rms_norm_eps),
            max_positions: self.max_position_embeddings,
            initializer_range: self.initializer_range,
            tied: self.tie_word_embeddings,
            next: None,
            names: Names {
                moe: "block_sparse_moe",
                expert: MlpNames { gate: "w1", up: "w3", down: "w2" },
                mlp: MlpNames::USUAL,
                experts_key: "num_local_experts",
                width_key: "intermediate_size",
            },
        }
    }

    fn write_hf(&self, fields: &mut Map<String, Value>) {
        fields.insert("head_dim".into(), json!(self.head_dim()));
        fields
            .insert("num_key_value_heads".into(), json!(self.num_key_value_heads.unwrap_or(self.num_attention_heads)));
    }
}
