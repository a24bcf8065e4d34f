//! DeepSeek-V3 (arXiv 2412.19437), and Kimi-K2 in bf16: latent attention, sigmoid scores, experts in groups that a
//! selection bias balances, shared experts, a multi-token-prediction module.

use dropless_core::ops::{Pairs, Score};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Family;
use super::rules::{self, Check, need, positive};
use crate::architecture::{Architecture, Feed, MoeConfig};
use crate::attention::{AttentionConfig, mla};
use crate::names::{MlpNames, Names};
use crate::rope::{Rope, Scaling};
use crate::{Single, single};

/// The keys of DeepSeek-V3.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeepseekV3 {
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
    /// Number of dense layers, which come first.
    pub first_k_dense_replace: usize,
    /// Number of attention heads.
    pub num_attention_heads: usize,
    /// Rank of the query projection; 0 for a full-rank `q_proj`.
    #[serde(default)]
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
    /// Shared experts, as one MLP of `n_shared_experts * moe_intermediate_size`; 0 for none.
    #[serde(default)]
    pub n_shared_experts: usize,
    /// Experts per token, K.
    pub num_experts_per_tok: usize,
    /// Groups of experts.
    pub n_group: usize,
    /// Groups that a token may choose from.
    pub topk_group: usize,
    /// Score function.
    #[serde(default)]
    pub scoring_func: ScoringFunc,
    /// Whether a token's weights are divided by their sum.
    pub norm_topk_prob: bool,
    /// Scaling factor of the weights.
    pub routed_scaling_factor: f64,
    /// Epsilon of the norms, added to the mean square, except in the norms of the latents.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the two elements of a rotary pair are neighbours; else they are half of the rotary elements apart.
    #[serde(default = "yes")]
    pub rope_interleave: bool,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether the embedding is also the output matrix.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Multi-token-prediction modules, 0 or 1.
    #[serde(default)]
    pub num_nextn_predict_layers: usize,
    /// Context extension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<Scaling>,
}

fn yes() -> bool {
    true
}

/// How router logits become scores. Files of the family may name it; other libraries always take the sigmoid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScoringFunc {
    /// `1 / (1 + exp(-x))` of each logit.
    #[default]
    Sigmoid,
    /// Over all experts, as in DeepSeek-V2: refused.
    Softmax,
}

/// What the norms of the latents add to the mean square, whatever `rms_norm_eps` is: their modules in the transformers
/// library are made without it.
const LATENT_EPS: f32 = 1e-6;

impl DeepseekV3 {
    fn dense(&self) -> Feed {
        Feed::Dense { width: self.intermediate_size }
    }

    fn moe(&self) -> Feed {
        Feed::Moe(MoeConfig {
            experts: self.n_routed_experts,
            top_k: self.num_experts_per_tok,
            width: self.moe_intermediate_size,
            shared_width: (self.n_shared_experts > 0)
                .then(|| self.n_shared_experts.saturating_mul(self.moe_intermediate_size)),
            score: Score::Sigmoid,
            groups: self.n_group,
            top_groups: self.topk_group,
            normalize: self.norm_topk_prob,
            scale: self.routed_scaling_factor,
            selection_bias: true,
        })
    }

    fn layer(&self, index: usize) -> Feed {
        if index < self.first_k_dense_replace { self.dense() } else { self.moe() }
    }

    fn check_routing(&self) -> Check {
        let (experts, k) = (self.n_routed_experts, self.num_experts_per_tok);
        let (groups, top_groups) = (self.n_group, self.topk_group);
        rules::choice(("num_experts_per_tok", k), ("n_routed_experts", experts))?;
        need(experts.is_multiple_of(groups), || {
            format!("n_group is {groups}, which does not divide model.n_routed_experts, {experts}")
        })?;
        need(experts > groups, || {
            format!(
                "n_group is {groups}, one expert in each, but a group's score is the sum of its two best experts: set n_group \
                 and topk_group to 1, or have fewer groups"
            )
        })?;
        need(top_groups <= groups, || format!("topk_group is {top_groups}, but model.n_group is {groups}"))?;
        let eligible = top_groups * (experts / groups);
        need(k <= eligible, || {
            format!(
                "num_experts_per_tok is {k}, but model.topk_group {top_groups} of {groups} groups leaves only {eligible} \
                 eligible experts"
            )
        })?;
        need(self.scoring_func == ScoringFunc::Sigmoid, || {
            "scoring_func is \"softmax\", but other libraries would read such a deepseek_v3 with sigmoid scores, as another \
             model (qwen3_moe and mixtral have softmax scores)"
                .to_owned()
        })
    }
}

impl Family for DeepseekV3 {
    const NAME: &'static str = "deepseek_v3";
    const ALSO: &'static [&'static str] = &["kimi_k2"];
    const CLASS: &'static str = "DeepseekV3ForCausalLM";
    const TOKENS: (Option<u32>, Option<u32>) = (Some(0), Some(1));
    const SPELLINGS: &'static [(&'static str, &'static str)] =
        &[("n_routed_experts", "num_local_experts"), ("num_nextn_predict_layers", "num_mtp_layers")];

    fn absent() -> Vec<(&'static str, Value)> {
        vec![("q_lora_rank", json!(1536)), ("n_shared_experts", json!(1))]
    }

    fn null() -> Vec<(&'static str, Value)> {
        vec![("rope_interleave", json!(false))]
    }

    fn check_derived(fields: &Map<String, Value>) -> Check {
        let given = |key: &str| fields.get(key).filter(|value| !value.is_null());
        match (given("num_key_value_heads"), given("num_attention_heads")) {
            (Some(kv), Some(heads)) if kv != heads => Err(format!(
                "num_key_value_heads is {kv}, but num_attention_heads is {heads}: in latent attention every head has keys \
                 and values"
            )),
            _ => Ok(()),
        }
    }

    fn fixed() -> Vec<(&'static str, Value)> {
        vec![
            ("hidden_act", json!("silu")),
            ("attention_bias", json!(false)),
            ("moe_layer_freq", json!(1)),
            ("topk_method", json!("noaux_tc")),
        ]
    }

    fn check(&self) -> Check {
        rules::common!(self).check()?;
        positive(&[
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
            ("n_group", self.n_group),
            ("topk_group", self.topk_group),
            ("moe_intermediate_size", self.moe_intermediate_size),
        ])?;
        let dense = self.first_k_dense_replace;
        need(dense == 0 || self.intermediate_size > 0, || {
            format!("intermediate_size is 0, but model.first_k_dense_replace asks for {dense} dense layers")
        })?;
        self.check_routing()?;
        let modules = self.num_nextn_predict_layers;
        need(modules <= 1, || format!("num_nextn_predict_layers is {modules}, expected 0 or 1"))?;
        // By 0, no expert would add anything.
        Single::FACTOR.check("routed_scaling_factor", self.routed_scaling_factor)
    }

    fn architecture(&self) -> Architecture {
        let attention = mla::Config {
            heads: self.num_attention_heads,
            q_rank: (self.q_lora_rank > 0).then_some(self.q_lora_rank),
            kv_rank: self.kv_lora_rank,
            nope: self.qk_nope_head_dim,
            rope: self.qk_rope_head_dim,
            v: self.v_head_dim,
            pairs: if self.rope_interleave { Pairs::Neighbours } else { Pairs::Halves },
            latent_eps: LATENT_EPS,
        };
        Architecture {
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            layers: (0..self.num_hidden_layers).map(|index| self.layer(index)).collect(),
            attention: AttentionConfig::Mla(attention),
            rope: Rope {
                dim: self.qk_rope_head_dim,
                theta: self.rope_theta,
                scaling: self.rope_scaling.clone(),
                scaled_scores: true,
            },
            eps: single(self.rms_norm_eps),
            max_positions: self.max_position_embeddings,
            initializer_range: self.initializer_range,
            tied: self.tie_word_embeddings,
            next: (self.num_nextn_predict_layers > 0).then(|| self.layer(self.num_hidden_layers)),
            names: Names {
                moe: "mlp",
                expert: MlpNames::USUAL,
                mlp: MlpNames::USUAL,
                experts_key: "n_routed_experts",
                width_key: "moe_intermediate_size",
            },
        }
    }

    fn write_hf(&self, fields: &mut Map<String, Value>) {
        fields.insert("num_key_value_heads".into(), json!(self.num_attention_heads));
        fields.insert("head_dim".into(), json!(self.qk_rope_head_dim));
        if self.q_lora_rank == 0 {
            fields.insert("q_lora_rank".into(), Value::Null);
        }
    }
}
