//! `[data]`: which texts a run is trained and validated on, and how they become ids. `docs/data.md` describes it.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Deserializer, Serialize, de};

/// The text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Globs of files, one source; empty for the embedded text, or for the sources below.
    pub train: Vec<String>,
    /// The part of the training text that is held out where no validation set is named.
    pub validation_fraction: f64,
    /// How text becomes ids.
    pub tokenizer: Tokenizer,
    /// Several sources with weights, instead of `train`.
    #[serde(default)]
    pub source: Vec<Source>,
    /// Validation sets; empty to hold out a part of the training text.
    pub validation: Vec<ValidationEntry>,
}

/// A source of training text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Globs of files.
    pub paths: Vec<String>,
    /// What the files are; by default what their names say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// The field of a JSON line that has the text.
    #[serde(default = "field")]
    pub field: String,
    /// Share of the sequences, relative to the other sources.
    #[serde(default = "weight")]
    pub weight: f64,
}

/// A validation set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Set {
    /// Its name in logs, metrics and `eval`.
    pub name: String,
    /// Globs of files.
    pub paths: Vec<String>,
    /// What the files are; by default what their names say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// The field of a JSON line that has the text.
    #[serde(default = "field")]
    pub field: String,
}

/// An entry of `data.validation`: the globs among them are one set, named `validation`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ValidationEntry {
    /// A glob of files.
    Glob(String),
    /// A set with a name.
    Set(Set),
}

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// A document.
    Text,
    /// A document in each line, in a field of a JSON object.
    Jsonl,
    /// Token ids in a `.bin` file, and where documents begin in an `.idx` file.
    Indexed,
}

/// How text becomes ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Tokenizer {
    /// Bytes are ids 0..255; 256 ends a document.
    Byte,
    /// A `tokenizer.json`, or a model directory that has one.
    File(String),
}

fn field() -> String {
    "text".into()
}

fn weight() -> f64 {
    1.0
}

impl DataConfig {
    /// The name of the validation set that a configuration does not name.
    pub const VALIDATION: &str = "validation";

    /// The training sources; none stands for the embedded text.
    pub fn sources(&self) -> Vec<Source> {
        if self.train.is_empty() {
            return self.source.clone();
        }
        vec![Source { paths: self.train.clone(), format: None, field: field(), weight: weight() }]
    }

    /// The validation sets, the one of plain globs first; none where a part of the training text is held out.
    pub fn validation_sets(&self) -> Vec<Set> {
        let (mut globs, mut sets) = (Vec::new(), Vec::new());
        for entry in &self.validation {
            match entry {
                ValidationEntry::Glob(glob) => globs.push(glob.clone()),
                ValidationEntry::Set(set) => sets.push(set.clone()),
            }
        }
        if !globs.is_empty() {
            sets.insert(0, Set { name: Self::VALIDATION.into(), paths: globs, format: None, field: field() });
        }
        sets
    }
}

impl From<String> for Tokenizer {
    fn from(name: String) -> Tokenizer {
        match &name[..] {
            "byte" | "bytes" => Tokenizer::Byte,
            _ => Tokenizer::File(name),
        }
    }
}

impl From<Tokenizer> for String {
    fn from(tokenizer: Tokenizer) -> String {
        match tokenizer {
            Tokenizer::Byte => "byte".into(),
            Tokenizer::File(path) => path,
        }
    }
}

impl<'de> Deserialize<'de> for ValidationEntry {
    /// A string or a table; an error of the table names its key.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ValidationEntry, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = ValidationEntry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a glob, or a table with name and paths")
            }

            fn visit_str<E: de::Error>(self, glob: &str) -> Result<ValidationEntry, E> {
                Ok(ValidationEntry::Glob(glob.into()))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<ValidationEntry, A::Error> {
                Set::deserialize(MapAccessDeserializer::new(map)).map(ValidationEntry::Set)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}
