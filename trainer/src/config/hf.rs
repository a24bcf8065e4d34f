//! The Hugging Face form of a model's configuration, `config.json`.
//!
//! Both spellings of rotary positions are read: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`. What
//! this library does not compute (another architecture, tied embeddings, biases) is refused by name.

use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{ModelConfig, RopeScaling, ScoringFunc};
use crate::error::{Error, Result};

const MODEL_TYPE: &str = "deepseek_v3";

/// The fields of a `config.json` that matter here; the others are metadata.
#[derive(Deserialize)]
struct Fields {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    moe_intermediate_size: usize,
    num_hidden_layers: usize,
    first_k_dense_replace: usize,
    num_attention_heads: usize,
    #[serde(default)]
    q_lora_rank: Option<usize>,
    kv_lora_rank: usize,
    qk_nope_head_dim: usize,
    qk_rope_head_dim: usize,
    v_head_dim: usize,
    n_routed_experts: usize,
    #[serde(default)]
    n_shared_experts: Option<usize>,
    num_experts_per_tok: usize,
    n_group: usize,
    topk_group: usize,
    #[serde(default)]
    scoring_func: Option<ScoringFunc>,
    norm_topk_prob: bool,
    routed_scaling_factor: f64,
    rms_norm_eps: f64,
    #[serde(default)]
    rope_theta: Option<f64>,
    max_position_embeddings: usize,
    initializer_range: f64,
    #[serde(default)]
    num_nextn_predict_layers: usize,
}

/// Fields with one supported value, which is also what they mean when absent.
fn fixed() -> [(&'static str, Value); 6] {
    [
        ("hidden_act", json!("silu")),
        ("tie_word_embeddings", json!(false)),
        ("attention_bias", json!(false)),
        ("rope_interleave", json!(true)),
        ("moe_layer_freq", json!(1)),
        ("topk_method", json!("noaux_tc")),
    ]
}

impl ModelConfig {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file and the field: unreadable, missing, or not supported.
    pub fn from_hf(path: &Path) -> Result<ModelConfig> {
        let text = fs::read_to_string(path).map_err(Error::io(path))?;
        let bad = |what: String| Error::checkpoint(path, what);
        let value: Value = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        let model_type = value.get("model_type").and_then(Value::as_str).unwrap_or("absent");
        if model_type != MODEL_TYPE {
            return Err(bad(format!("model_type is {model_type}, but only {MODEL_TYPE} is supported")));
        }
        for (name, supported) in fixed() {
            match value.get(name) {
                Some(found) if *found != supported => {
                    return Err(bad(format!("{name} is {found}, but only {supported} is supported")));
                }
                _ => {}
            }
        }
        let rope = rope(&value).map_err(bad)?;
        let f: Fields = serde_path_to_error::deserialize(&value).map_err(|e| bad(e.to_string()))?;
        let model = ModelConfig {
            vocab_size: f.vocab_size,
            hidden_size: f.hidden_size,
            intermediate_size: f.intermediate_size,
            moe_intermediate_size: f.moe_intermediate_size,
            num_hidden_layers: f.num_hidden_layers,
            first_k_dense_replace: f.first_k_dense_replace,
            num_attention_heads: f.num_attention_heads,
            q_lora_rank: f.q_lora_rank.unwrap_or(0),
            kv_lora_rank: f.kv_lora_rank,
            qk_nope_head_dim: f.qk_nope_head_dim,
            qk_rope_head_dim: f.qk_rope_head_dim,
            v_head_dim: f.v_head_dim,
            n_routed_experts: f.n_routed_experts,
            n_shared_experts: f.n_shared_experts.unwrap_or(0),
            num_experts_per_tok: f.num_experts_per_tok,
            n_group: f.n_group,
            topk_group: f.topk_group,
            scoring_func: f.scoring_func.unwrap_or(ScoringFunc::Sigmoid),
            norm_topk_prob: f.norm_topk_prob,
            routed_scaling_factor: f.routed_scaling_factor,
            rms_norm_eps: f.rms_norm_eps,
            rope_theta: rope.theta.or(f.rope_theta).unwrap_or(10000.0),
            max_position_embeddings: f.max_position_embeddings,
            initializer_range: f.initializer_range,
            num_nextn_predict_layers: f.num_nextn_predict_layers,
            rope_scaling: rope.scaling,
        };
        model.check().map_err(|e| bad(e.to_string()))?;
        Ok(model)
    }

    /// The text of a `config.json` that [`from_hf`](ModelConfig::from_hf) and Hugging Face libraries read.
    pub fn to_hf(&self) -> String {
        let mut fields = match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            _ => unreachable!("a model configuration is a JSON object"),
        };
        fields.extend(fixed().map(|(name, value)| (name.to_owned(), value)));
        fields.insert("model_type".into(), json!(MODEL_TYPE));
        fields.insert("architectures".into(), json!(["DeepseekV3ForCausalLM"]));
        fields.insert("num_key_value_heads".into(), json!(self.num_attention_heads));
        fields.insert("torch_dtype".into(), json!("float32"));
        if self.q_lora_rank == 0 {
            fields.insert("q_lora_rank".into(), Value::Null);
        }
        serde_json::to_string_pretty(&fields).unwrap_or_else(|e| unreachable!("JSON values print: {e}")) + "\n"
    }
}

struct Rope {
    theta: Option<f64>,
    scaling: Option<RopeScaling>,
}

fn rope(config: &Value) -> std::result::Result<Rope, String> {
    let object = |name: &str| config.get(name).and_then(Value::as_object);
    let Some(found) = object("rope_parameters").or_else(|| object("rope_scaling")) else {
        return Ok(Rope { theta: None, scaling: None });
    };
    let theta = found.get("rope_theta").and_then(Value::as_f64);
    let method = found.get("rope_type").or_else(|| found.get("type")).and_then(Value::as_str).unwrap_or("default");
    match method {
        "default" => Ok(Rope { theta, scaling: None }),
        "yarn" => {
            const KNOWN: [&str; 6] =
                ["factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"];
            let mut fields: Map<String, Value> = found
                .iter()
                .filter(|(k, _)| KNOWN.contains(&k.as_str()))
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect();
            fields.insert("type".into(), json!("yarn"));
            let scaling = serde_json::from_value(Value::Object(fields)).map_err(|e| format!("rope scaling: {e}"))?;
            Ok(Rope { theta, scaling: Some(scaling) })
        }
        other => Err(format!("rope type is {other}, but only default and yarn are supported")),
    }
}
