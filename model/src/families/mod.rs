//! Model families: one file each, which maps configuration keys and tensor names and states the parts of a model.
//!
//! A family is a struct whose fields are the keys of its Hugging Face `config.json`, with an implementation of
//! [`Family`] and a line in the list below. Everything else works on the [`Architecture`] that it describes.

mod deepseek_v3;
mod keys;
mod mixtral;
mod qwen3_moe;
mod rules;

pub use deepseek_v3::{DeepseekV3, ScoringFunc};
pub use mixtral::Mixtral;
pub use qwen3_moe::Qwen3Moe;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::architecture::Architecture;
use crate::error::{Error, Result};
use crate::fields;

/// What a family file provides.
pub trait Family: Serialize + DeserializeOwned {
    /// `model_type` in `config.json`, and `family` in a configuration.
    const NAME: &'static str;
    /// Other model types with the same tensors and keys.
    const ALSO: &'static [&'static str] = &[];
    /// The model's class in the transformers library.
    const CLASS: &'static str;
    /// Other spellings of keys: (the family's, the other).
    const SPELLINGS: &'static [(&'static str, &'static str)] = &[];
    /// The ids that begin and end a text where `config.json` has no such keys, as the transformers library has them.
    const TOKENS: (Option<u32>, Option<u32>) = (None, None);

    /// Keys of `config.json` that are not fields, with their one supported value, which is also what an absent or null
    /// key means.
    fn fixed() -> Vec<(&'static str, Value)>;

    /// The base of the rotary frequencies of a `config.json` that does not state it.
    const THETA: f64 = 10_000.0;

    /// The values of keys that are absent from a `config.json`, where they differ from what an absent field means here.
    /// A null is not absent.
    fn absent() -> Vec<(&'static str, Value)> {
        Vec::new()
    }

    /// The values of keys that are null in a `config.json`, where they differ from what an absent field means here.
    fn null() -> Vec<(&'static str, Value)> {
        Vec::new()
    }

    /// Verifies the keys of a `config.json` that are derived from others.
    ///
    /// # Errors
    /// A line that names the key and its value.
    fn check_derived(_fields: &Map<String, Value>) -> std::result::Result<(), String> {
        Ok(())
    }

    /// Verifies the values.
    ///
    /// # Errors
    /// A line that names fields and values of the first rule that is violated.
    fn check(&self) -> std::result::Result<(), String>;

    /// The parts of the model. Its configuration has been checked.
    fn architecture(&self) -> Architecture;

    /// Adds what follows from the fields to a `config.json`, and changes what is spelled differently there.
    fn write_hf(&self, _fields: &mut Map<String, Value>) {}
}

macro_rules! families {
    ($($family:ident),+ $(,)?) => {
        /// The configuration of a model: its family, and that family's keys in the names of its Hugging Face `config.json`.
        #[derive(Clone, Debug, PartialEq)]
        pub enum ModelConfig {
            $(#[doc = concat!("See [`", stringify!($family), "`].")] $family($family),)+
        }

        impl ModelConfig {
            /// The names of all families.
            pub const FAMILIES: &'static [&'static str] = &[$(<$family as Family>::NAME),+];

            /// The family's name.
            pub fn family(&self) -> &'static str {
                match self { $(ModelConfig::$family(_) => <$family as Family>::NAME,)+ }
            }

            /// The parts of the model.
            pub fn architecture(&self) -> Architecture {
                match self { $(ModelConfig::$family(model) => model.architecture(),)+ }
            }

            /// Verifies the architecture on its own.
            ///
            /// # Errors
            /// [`Error::Config`] with the first rule that does not hold.
            pub fn check(&self) -> Result<()> {
                let checked = match self { $(ModelConfig::$family(model) => model.check(),)+ };
                let key = |e| Error::Config(format!("model.{e}"));
                checked.map_err(key)?;
                let parts = self.architecture();
                parts.attention.check().map_err(key)?;
                rules::size(&parts).map_err(Error::Config)
            }

            /// The keys of a family; None if there is no such family.
            pub fn keys(family: &str) -> Option<&'static [&'static str]> {
                match family { $(<$family as Family>::NAME => Some(keys::of::<$family>()),)+ _ => None }
            }

            /// The family's keys and values.
            pub(crate) fn fields(&self) -> Map<String, Value> {
                let value = match self { $(ModelConfig::$family(model) => serde_json::to_value(model),)+ };
                match value {
                    Ok(Value::Object(fields)) => fields,
                    other => unreachable!("a model configuration is a JSON object: {other:?}"),
                }
            }

            fn from_fields(family: &str, given: Map<String, Value>) -> std::result::Result<ModelConfig, String> {
                match family {
                    $(<$family as Family>::NAME => fields::read(given).map(ModelConfig::$family),)+
                    other => Err(unknown(other)),
                }
            }

            /// What the family of a `model_type` says of `config.json`.
            pub(crate) fn form(model_type: &str) -> Option<Form> {
                $(if model_type == <$family as Family>::NAME || <$family as Family>::ALSO.contains(&model_type) {
                    return Some(Form {
                        family: <$family as Family>::NAME,
                        class: <$family as Family>::CLASS,
                        spellings: <$family as Family>::SPELLINGS,
                        tokens: <$family as Family>::TOKENS,
                        fixed: <$family as Family>::fixed(),
                        absent: <$family as Family>::absent(),
                        null: <$family as Family>::null(),
                        theta: <$family as Family>::THETA,
                        check_derived: <$family as Family>::check_derived,
                    });
                })+
                None
            }

            pub(crate) fn write_hf(&self, fields: &mut Map<String, Value>) {
                match self { $(ModelConfig::$family(model) => model.write_hf(fields),)+ }
            }
        }
    };
}

families!(DeepseekV3, Qwen3Moe, Mixtral);

/// How a family appears in `config.json`.
#[derive(Debug)]
pub(crate) struct Form {
    pub(crate) family: &'static str,
    pub(crate) class: &'static str,
    pub(crate) spellings: &'static [(&'static str, &'static str)],
    pub(crate) tokens: (Option<u32>, Option<u32>),
    pub(crate) fixed: Vec<(&'static str, Value)>,
    pub(crate) absent: Vec<(&'static str, Value)>,
    pub(crate) null: Vec<(&'static str, Value)>,
    pub(crate) theta: f64,
    pub(crate) check_derived: fn(&Map<String, Value>) -> std::result::Result<(), String>,
}

impl ModelConfig {
    /// Removes the multi-token-prediction module if no tensor is `present` whose name, without `model.`, starts like
    /// those of the module.
    pub fn drop_absent_modules(&mut self, present: impl Fn(&str) -> bool) {
        if let ModelConfig::DeepseekV3(model) = self
            && !present(&format!("layers.{}.", model.num_hidden_layers))
        {
            model.num_nextn_predict_layers = 0;
        }
    }
}

fn unknown(family: &str) -> String {
    format!("family is {family}, expected one of {}", ModelConfig::FAMILIES.join(", "))
}

impl ModelConfig {
    /// The configuration with these keys and values.
    pub(crate) fn of_family(family: &str, fields: Map<String, Value>) -> std::result::Result<ModelConfig, String> {
        ModelConfig::from_fields(family, fields)
    }
}

/// The path of the first null.
fn null(fields: &Map<String, Value>) -> Option<String> {
    fields.iter().find_map(|(key, value)| match value {
        Value::Null => Some(key.clone()),
        Value::Object(inner) => null(inner).map(|path| format!("{key}.{path}")),
        _ => None,
    })
}

impl Serialize for ModelConfig {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut fields = Map::new();
        fields.insert("family".into(), self.family().into());
        fields.extend(self.fields());
        fields.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ModelConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<ModelConfig, D::Error> {
        let mut fields = Map::deserialize(deserializer)?;
        let custom = serde::de::Error::custom;
        // What is no number in JSON arrives as null, and absent keys are left out.
        if let Some(path) = null(&fields) {
            return Err(custom(format!("{path} is not a finite number")));
        }
        match fields.remove("family") {
            Some(Value::String(family)) => ModelConfig::of_family(&family, fields).map_err(custom),
            Some(other) => Err(custom(unknown(&other.to_string()))),
            None => Err(custom(unknown("absent"))),
        }
    }
}
