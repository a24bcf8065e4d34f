//! The Hugging Face form of a model's configuration, `config.json`.
//!
//! Both spellings of rotary positions are read: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`. What
//! this library does not compute (another architecture, biases, sliding windows) is refused by name.

use std::path::Path;

use dropless_core::files;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::families::{Form, ModelConfig};

/// The name of the configuration in a model directory.
pub const CONFIG: &str = "config.json";
/// The name of the generation settings.
pub const GENERATION_CONFIG: &str = "generation_config.json";
/// The longest `config.json`. What it becomes in memory is many times larger.
const LONGEST: u64 = 1 << 20;

/// Keys of any family that say nothing about what a model computes.
const METADATA: &[&str] = &[
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "ep_size",
    "max_window_layers",
    "model_type",
    ORIGINAL,
    "output_router_logits",
    "pad_token_id",
    PARTIAL,
    "pretraining_tp",
    "quantization_config",
    "rope_parameters",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
    "sliding_window",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];
/// Keys of rotary positions.
const THETA: &str = "rope_theta";
const PARTIAL: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";
/// Where such a key stands that is in neither object.
const OUTSIDE: &str = "on its own";
/// Keys that follow from others.
const DERIVED: &[&str] = &["head_dim", "num_key_value_heads", "qk_head_dim"];

/// A `config.json` as it was read.
#[derive(Clone, Debug)]
pub struct HfConfig {
    /// The model.
    pub model: ModelConfig,
    /// Keys that were ignored because nothing here knows what they mean.
    pub ignored: Vec<String>,
    /// The file's own words, for what concerns weights and tokens.
    pub fields: Map<String, Value>,
}

impl HfConfig {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file and the field: unreadable, missing, or not supported.
    pub fn read(path: &Path) -> Result<HfConfig> {
        let text = files::read_text(path, LONGEST)?;
        HfConfig::parse(&text).map_err(|what| Error::checkpoint(path, what))
    }

    fn parse(text: &str) -> std::result::Result<HfConfig, String> {
        let value: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let Value::Object(all) = value else { return Err("is not a JSON object".into()) };
        let model_type = match all.get("model_type") {
            None | Some(Value::Null) => "absent".to_owned(),
            Some(Value::String(name)) => name.clone(),
            Some(other) => other.to_string(),
        };
        let form = ModelConfig::form(&model_type).ok_or_else(|| {
            format!("model_type is {model_type}, but only {} are supported", ModelConfig::FAMILIES.join(", "))
        })?;
        check_fixed(&form, &all)?;
        let keys = ModelConfig::keys(form.family).unwrap_or_default();
        let mut fields = Map::new();
        let mut ignored = Vec::new();
        for (key, value) in all.iter().filter(|(_, value)| !value.is_null()) {
            let key = form.spellings.iter().find(|(_, other)| other == key).map_or(key.as_str(), |(ours, _)| ours);
            if keys.contains(&key) {
                if let Some(before) = fields.insert(key.to_owned(), value.clone()).filter(|before| before != value) {
                    return Err(format!("{key} is {value}, but {before} in another spelling"));
                }
            } else if !METADATA.contains(&key) && !DERIVED.contains(&key) && form.fixed.iter().all(|(k, _)| *k != key) {
                ignored.push(key.to_owned());
            }
        }
        for (key, value) in &form.absent {
            let spelt = |name: &str| all.contains_key(name);
            if !spelt(key) && !form.spellings.iter().any(|(ours, other)| ours == key && spelt(other)) {
                fields.entry(*key).or_insert_with(|| value.clone());
            }
        }
        for (key, value) in form.null.iter().filter(|(key, _)| all.get(*key).is_some_and(Value::is_null)) {
            fields.insert((*key).to_owned(), value.clone());
        }
        let rope = rope(&all, form.theta)?;
        fields.remove("rope_scaling");
        fields.extend(rope);
        (form.check_derived)(&all)?;
        let model = ModelConfig::of_family(form.family, fields)?;
        model.check().map_err(|e| e.to_string())?;
        Ok(HfConfig { model, ignored, fields: all })
    }
}

impl HfConfig {
    /// The text of the same file for weights of another type (None: the same), none of which is quantized.
    pub(super) fn with_dtype(&self, dtype: Option<&str>) -> String {
        let mut fields = self.fields.clone();
        fields.remove("quantization_config");
        if let Some(dtype) = dtype {
            let spellings: Vec<&str> =
                ["dtype", "torch_dtype"].into_iter().filter(|k| fields.contains_key(*k)).collect();
            let spellings = if spellings.is_empty() { vec!["torch_dtype"] } else { spellings };
            fields.extend(spellings.into_iter().map(|key| (key.to_owned(), json!(dtype))));
        }
        pretty(&fields)
    }
}

/// The ids that begin and end texts, and fill them up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpecialTokens {
    /// Begins a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos: Option<u32>,
    /// Each ends a text.
    #[serde(default)]
    pub eos: Vec<u32>,
    /// Fills up a batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad: Option<u32>,
}

const BOS: &str = "bos_token_id";
const EOS: &str = "eos_token_id";
const PAD: &str = "pad_token_id";

impl SpecialTokens {
    /// Those of a `config.json`. Where it has no such key, libraries take what is usual in its family.
    pub fn of(config: &HfConfig) -> SpecialTokens {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = |key: &str, usual: Option<u32>| match config.fields.get(key) {
            None => usual.into_iter().collect(),
            Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
            Some(value) => id(value).into_iter().collect::<Vec<_>>(),
        };
        let (bos, eos) = ModelConfig::form(config.model.family()).map_or((None, None), |form| form.tokens);
        let one = |ids: Vec<u32>| ids.first().copied();
        SpecialTokens { bos: one(ids(BOS, bos)), eos: ids(EOS, eos), pad: one(ids(PAD, None)) }
    }

    /// As keys of a `config.json`. All are there: what is absent means the usual ids of the family.
    fn fields(&self) -> [(String, Value); 3] {
        let eos = match self.eos[..] {
            [] => Value::Null,
            [id] => json!(id),
            _ => json!(self.eos),
        };
        [(BOS, json!(self.bos)), (EOS, eos), (PAD, json!(self.pad))].map(|(key, value)| (key.to_owned(), value))
    }

    /// The text of a `generation_config.json`.
    pub fn generation_config(&self) -> String {
        let mut fields = Map::new();
        fields.insert("_from_model_config".into(), json!(true));
        fields.extend(self.fields().into_iter().filter(|(_, value)| !value.is_null()));
        pretty(&fields)
    }
}

fn pretty(fields: &Map<String, Value>) -> String {
    serde_json::to_string_pretty(fields).unwrap_or_else(|e| unreachable!("JSON values print: {e}")) + "\n"
}

fn check_fixed(form: &Form, all: &Map<String, Value>) -> std::result::Result<(), String> {
    for (name, supported) in &form.fixed {
        match all.get(*name) {
            Some(found) if found != supported && !found.is_null() => {
                return Err(format!("{name} is {found}, but only {supported} is supported"));
            }
            _ => {}
        }
    }
    Ok(())
}

impl ModelConfig {
    /// Reads the model of a `config.json`.
    ///
    /// # Errors
    /// As [`HfConfig::read`].
    pub fn from_hf(path: &Path) -> Result<ModelConfig> {
        Ok(HfConfig::read(path)?.model)
    }

    /// The text of a `config.json` that [`from_hf`](ModelConfig::from_hf) and Hugging Face libraries read.
    pub fn to_hf(&self, tokens: &SpecialTokens) -> String {
        let form = ModelConfig::form(self.family()).unwrap_or_else(|| unreachable!("a family knows its own name"));
        let mut fields = self.fields();
        if let Some(Value::Object(rope)) = fields.get_mut("rope_scaling") {
            let method = rope.get("type").cloned().unwrap_or_default();
            rope.insert("rope_type".into(), method);
        }
        fields.extend(form.fixed.into_iter().map(|(name, value)| (name.to_owned(), value)));
        fields.insert("model_type".into(), json!(form.family));
        fields.insert("architectures".into(), json!([form.class]));
        fields.insert("torch_dtype".into(), json!("float32"));
        fields.extend(tokens.fields());
        self.write_hf(&mut fields);
        pretty(&fields)
    }
}

/// One of the two objects that describe rotary positions.
struct Positions {
    name: &'static str,
    theta: Option<Value>,
    /// The context extension with its type; None for the type `default`.
    scaling: Option<Map<String, Value>>,
}

impl Positions {
    /// None where the key is absent, null or an empty object.
    fn read(all: &Map<String, Value>, name: &'static str) -> std::result::Result<Option<Positions>, String> {
        let mut found = match all.get(name) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Object(found)) if found.is_empty() => return Ok(None),
            Some(Value::Object(found)) => found.clone(),
            Some(other) => return Err(format!("{name} is {other}, expected an object")),
        };
        let method = match (found.remove("rope_type"), found.remove("type")) {
            (Some(a), Some(b)) if a != b => return Err(format!("{name} has rope_type {a} and type {b}")),
            (a, b) => a.or(b).unwrap_or(json!("default")),
        };
        // Of these keys null alone does not mean what their absence means.
        if let Some(truncate) = found.get_mut("truncate").filter(|value| value.is_null()) {
            *truncate = json!(false);
        }
        found.retain(|_, value| !value.is_null());
        whole(&format!("in {name}"), found.remove(PARTIAL).as_ref())?;
        let theta = found.remove(THETA);
        let scaling = match method.as_str() {
            Some("default") => match found.keys().next() {
                Some(key) => return Err(format!("{name} has {key}, which its type default does not have")),
                None => None,
            },
            Some("linear" | "yarn" | "llama3") => {
                found.insert("type".into(), method);
                complete(all, name, &mut found)?;
                Some(found)
            }
            _ => {
                return Err(format!(
                    "{name} has type {method}, but only default, linear, yarn and llama3 are supported"
                ));
            }
        };
        Ok(Some(Positions { name, theta, scaling }))
    }
}

/// Refuses rotary positions on a part of the elements that they are for.
fn whole(place: &str, partial: Option<&Value>) -> std::result::Result<(), String> {
    match partial {
        Some(share) if !share.is_null() && share.as_f64() != Some(1.0) => {
            Err(format!("{PARTIAL} is {share} {place}, but only 1 is supported"))
        }
        _ => Ok(()),
    }
}

/// `rope_theta` and `rope_scaling` out of whichever spelling there is. `rope_scaling` wins over a default
/// `rope_parameters`, as in the transformers library; other contradictions are refused. `usual` is the family's theta where
/// no spelling has one.
fn rope(all: &Map<String, Value>, usual: f64) -> std::result::Result<Map<String, Value>, String> {
    whole(OUTSIDE, all.get(PARTIAL))?;
    let (newer, older) = (Positions::read(all, "rope_parameters")?, Positions::read(all, "rope_scaling")?);
    if let (Some(newer), Some(older)) = (&newer, &older)
        && newer.scaling.is_some()
        && newer.scaling != older.scaling
    {
        return Err(format!("{} and {} differ", newer.name, older.name));
    }
    let inside = |positions: &Option<Positions>| {
        let positions = positions.as_ref()?;
        Some((format!("in {}", positions.name), positions.theta.clone()?))
    };
    let outside = all.get(THETA).filter(|value| !value.is_null()).map(|value| (OUTSIDE.to_owned(), value.clone()));
    // The order in which the transformers library looks: what is beside rope_scaling does not count where there is one.
    let chosen = inside(if older.is_some() { &older } else { &newer }).or_else(|| outside.clone());
    let (place, theta) = chosen.unwrap_or_else(|| ("by default".to_owned(), json!(usual)));
    for (other, value) in [inside(&newer), inside(&older), outside].into_iter().flatten() {
        if value.as_f64() != theta.as_f64() {
            return Err(format!("{THETA} is {value} {other}, but {theta} {place}, which counts"));
        }
    }
    let mut out = Map::from_iter([(THETA.to_owned(), theta)]);
    if let Some(scaling) = older.or(newer).and_then(|positions| positions.scaling) {
        out.insert("rope_scaling".into(), Value::Object(scaling));
    }
    Ok(out)
}

/// What a scaling means where it leaves out the original length or the factor. An original length outside of it counts,
/// too.
fn complete(all: &Map<String, Value>, name: &str, scaling: &mut Map<String, Value>) -> std::result::Result<(), String> {
    if scaling.get("type").and_then(Value::as_str) == Some("linear") {
        return Ok(());
    }
    let given = |key: &str| all.get(key).filter(|value| !value.is_null());
    if let Some(outside) = given(ORIGINAL) {
        let inside = scaling.entry(ORIGINAL).or_insert_with(|| outside.clone());
        if inside.as_f64() != outside.as_f64() {
            return Err(format!("{ORIGINAL} is {inside} in {name}, but {outside} {OUTSIDE}"));
        }
    }
    let Some(longest) = given("max_position_embeddings") else { return Ok(()) };
    let original = scaling.entry(ORIGINAL).or_insert_with(|| longest.clone()).as_f64();
    if let (Some(longest), Some(original)) = (longest.as_f64(), original)
        && scaling.get("type").and_then(Value::as_str) == Some("yarn")
    {
        scaling.entry("factor").or_insert_with(|| json!(longest / original));
    }
    Ok(())
}
