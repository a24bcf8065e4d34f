//! Qwen3-MoE (arXiv 2505.09388): grouped-query attention with a norm per head, softmax scores over all experts, sparse
//! layers at a fixed step with exceptions.

use dropless_core::ops::{Pairs, Score};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Family;
use super::rules::{self, Check, need, positive};
use crate::architecture::{Architecture, Feed, MoeConfig};
use crate::attention::{AttentionConfig, gqa};
use crate::names::{MlpNames, Names};
use crate::rope::{Rope, Scaling};
use crate::single;

/// The keys of Qwen3-MoE.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Qwen3Moe {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// MLP width of a dense layer.
    pub intermediate_size: usize,
    /// MLP width of an expert, I.
    pub moe_intermediate_size: usize,
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
    pub num_experts: usize,
    /// Experts per token, K.
    pub num_experts_per_tok: usize,
    /// Whether a token's weights are divided by their sum.
    #[serde(default)]
    pub norm_topk_prob: bool,
    /// Every n-th layer is a Mixture-of-Experts layer.
    #[serde(default = "one")]
    pub decoder_sparse_step: usize,
    /// Layers that are dense nevertheless.
    #[serde(default)]
    pub mlp_only_layers: Vec<usize>,
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

fn one() -> usize {
    1
}

impl Qwen3Moe {
    fn layer(&self, index: usize) -> Feed {
        let sparse = (index + 1).is_multiple_of(self.decoder_sparse_step) && !self.mlp_only_layers.contains(&index);
        if !sparse || self.num_experts == 0 {
            return Feed::Dense { width: self.intermediate_size };
        }
        Feed::Moe(MoeConfig {
            experts: self.num_experts,
            top_k: self.num_experts_per_tok,
            width: self.moe_intermediate_size,
            shared_width: None,
            score: Score::Softmax,
            groups: 1,
            top_groups: 1,
            normalize: self.norm_topk_prob,
            scale: 1.0,
            selection_bias: false,
        })
    }

    fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }
}

impl Family for Qwen3Moe {
    const NAME: &'static str = "qwen3_moe";
    const CLASS: &'static str = "Qwen3MoeForCausalLM";
    const SPELLINGS: &'static [(&'static str, &'static str)] = &[("num_experts", "num_local_experts")];

    fn absent() -> Vec<(&'static str, Value)> {
        vec![("num_key_value_heads", json!(4))]
    }

    fn fixed() -> Vec<(&'static str, Value)> {
        vec![("hidden_act", json!("silu")), ("attention_bias", json!(false)), ("use_sliding_window", json!(false))]
    }

    fn check(&self) -> Check {
        rules::common!(self).check()?;
        positive(&[("decoder_sparse_step", self.decoder_sparse_step), ("head_dim", self.head_dim())])?;
        let layers = self.num_hidden_layers;
        if let Some(layer) = self.mlp_only_layers.iter().find(|&&layer| layer >= layers) {
            return Err(format!("mlp_only_layers names layer {layer}, but model.num_hidden_layers is {layers}"));
        }
        let feeds: Vec<Feed> = (0..layers).map(|index| self.layer(index)).collect();
        let dense = feeds.iter().any(|feed| matches!(feed, Feed::Dense { .. }));
        need(!dense || self.intermediate_size > 0, || "intermediate_size is 0, but there are dense layers".to_owned())?;
        if feeds.iter().any(|feed| matches!(feed, Feed::Moe(_))) {
            rules::choice(("num_experts_per_tok", self.num_experts_per_tok), ("num_experts", self.num_experts))?;
            positive(&[("moe_intermediate_size", self.moe_intermediate_size)])?;
        }
        Ok(())
    }

    fn architecture(&self) -> Architecture {
        let head_dim = self.head_dim();
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        let kv_heads = kv_heads.unwrap_or(heads);
        let attention = gqa::Config { heads, kv_heads, head_dim, qk_norm: true, pairs: Pairs::Halves };
        Architecture {
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            layers: (0..self.num_hidden_layers).map(|index| self.layer(index)).collect(),
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
                moe: "mlp",
                expert: MlpNames::USUAL,
                mlp: MlpNames::USUAL,
                experts_key: "num_experts",
                width_key: "moe_intermediate_size",
            },
        }
    }

    fn write_hf(&self, fields: &mut Map<String, Value>) {
        fields.insert("head_dim".into(), json!(self.head_dim()));
        fields
            .insert("num_key_value_heads".into(), json!(self.num_key_value_heads.unwrap_or(self.num_attention_heads)));
    }
}
