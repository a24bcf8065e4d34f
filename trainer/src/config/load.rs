//! Reading a configuration: defaults, then the file, then `--set` overrides, merged as TOML tables.
//!
//! Unknown keys are found while merging, so that the message can name the nearest key of the right section.

use std::collections::BTreeSet;
use std::path::Path;

use dropless_core::files;
use dropless_model::hf::{ModelDir, SpecialTokens};
use dropless_model::words::plain;
use toml::{Table, Value};

use super::{Config, ModelConfig, Origin};
use crate::data::TOKENIZER;
use crate::error::{Error, Result};

/// The defaults, of DeepSeek-V3; together with [`ModelConfig::keys`] the list of all keys.
const DEFAULT: &str = include_str!("../../../configs/default.toml");
/// What the other families have instead: their `[model]`, and keys of other sections that they need otherwise.
const FAMILIES: &[(&str, &str)] = &[
    ("qwen3_moe", include_str!("../../../configs/qwen3_moe.toml")),
    ("mixtral", include_str!("../../../configs/mixtral.toml")),
];
/// The section of the architecture, and its key that says whose keys the others are.
const MODEL: &str = "model";
const FAMILY: &str = "family";

/// The one key of a model that changes none of its weights.
const LONGEST: &str = "model.max_position_embeddings";
/// The name of overrides in messages.
const SET: &str = "--set";
/// More parts than any key has.
const DEEPEST: usize = 8;
/// The section that a run writes and no one else.
const ORIGIN: &[&str] =
    &["origin", "origin.directory", "origin.tokens", "origin.tokens.bos", "origin.tokens.eos", "origin.tokens.pad"];

/// The longest configuration file. What it becomes in memory is many times larger.
const LONGEST_FILE: u64 = 1 << 20;

/// The keys of `model.rope_scaling`, of all its types.
const ROPE_SCALING: &[&str] = &[
    "type",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
];

impl Config {
    /// The defaults of the family that the file or `overrides` name, overridden by the file and then by `overrides` of the
    /// form `section.key=value` (values in TOML; what is no TOML value is a string).
    ///
    /// # Errors
    /// [`Error::Config`] for a file that cannot be read, is not TOML, or has an unknown key or a wrong type.
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Config> {
        let layers = layers(file, overrides)?;
        let family = layers.iter().rev().find_map(|(table, _)| family(table));
        let mut table = defaults(family.as_deref())?;
        for (user, name) in layers {
            reject_unknown(&user, &table, &name)?;
            overlay(&mut table, user);
        }
        from_table(table)
    }

    /// The configuration of a run that begins with the weights of `dir`: its model, and everything else as in
    /// [`load`](Config::load). Sequences are as long as by default, or as the model allows.
    ///
    /// # Errors
    /// As [`load`](Config::load); and for a key that would make another model of it. Only the longest sequence may change.
    pub fn of_model(dir: &ModelDir, file: Option<&Path>, overrides: &[String]) -> Result<Config> {
        let model = &dir.config.model;
        let mut table = defaults(Some(model.family()))?;
        let fields = Table::try_from(model).map_err(|e| Error::Config(format!("{}: {e}", dir.path.display())))?;
        table.insert(MODEL.into(), Value::Table(fields));
        let longest = model.architecture().max_positions;
        if let Some(length) = table.get_mut("train").and_then(|train| train.get_mut("sequence_length")) {
            let shorter = length.as_integer().map(|default| default.min(i64::try_from(longest).unwrap_or(i64::MAX)));
            *length = shorter.map_or(length.clone(), Value::Integer);
        }
        // Its text is made of its own tokens, if it says what they are.
        if let Some(own) = Some(dir.path.join(TOKENIZER)).filter(|file| file.is_file())
            && let (Some(data), Some(own)) = (table.get_mut("data").and_then(Value::as_table_mut), own.to_str())
        {
            data.insert("tokenizer".into(), Value::String(own.to_owned()));
        }
        for (user, name) in layers(file, overrides)? {
            reject_other_model(&user, &table, &name, &dir.path)?;
            reject_unknown(&user, &table, &name)?;
            overlay(&mut table, user);
        }
        let mut config = from_table(table)?;
        let directory = std::path::absolute(&dir.path).map_err(Error::io(&dir.path))?;
        let not_text =
            || Error::Config(format!("{}: the name of a model directory must be UTF-8", directory.display()));
        let directory = directory.to_str().ok_or_else(not_text)?.to_owned();
        config.origin = Some(Origin { directory, tokens: SpecialTokens::of(&dir.config) });
        Ok(config)
    }

    /// This configuration with `overrides` as in [`load`](Config::load).
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn with(&self, overrides: &[String]) -> Result<Config> {
        let mut table = parse(&self.to_toml(), "configuration")?;
        for text in overrides {
            let user = parse_override(text)?;
            reject_unknown(&user, &table, SET)?;
            overlay(&mut table, user);
        }
        from_table(table)
    }

    /// The path of the key with this name, if one key alone has it.
    pub fn path_of(&self, key: &str) -> Option<String> {
        let table = Table::try_from(self).ok()?;
        let mut found = paths(&table).into_iter().filter(|path| path.rsplit('.').next() == Some(key));
        let path = found.next().filter(|path| path.contains('.'))?;
        found.next().is_none().then_some(path)
    }

    /// The configuration as TOML, every key present.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|e| unreachable!("a configuration is plain TOML: {e}"))
    }

    /// Reads what [`to_toml`](Config::to_toml) wrote; `name` is the file's, for messages.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn from_toml(text: &str, name: &str) -> Result<Config> {
        from_table(parse(text, name)?)
    }
}

/// The tables of the file and of `overrides`, each with its name for messages.
fn layers(file: Option<&Path>, overrides: &[String]) -> Result<Vec<(Table, String)>> {
    let mut layers = Vec::new();
    if let Some(path) = file {
        let name = path.display().to_string();
        let text = files::read_text(path, LONGEST_FILE).map_err(|e| Error::Config(e.to_string()))?;
        layers.push((parse(&text, &name)?, name));
    }
    for text in overrides {
        layers.push((parse_override(text)?, SET.to_owned()));
    }
    Ok(layers)
}

/// Fails at the first key of `user` by which the model would be another one than `dir` has.
fn reject_other_model(user: &Table, table: &Table, name: &str, dir: &Path) -> Result<()> {
    let at = |table: &Table, path: &str| {
        let mut value = Value::Table(table.clone());
        for key in path.split('.') {
            value = value.get(key)?.clone();
        }
        Some(value)
    };
    // 10000 and 10000.0 are the same number.
    let number = |value: Option<&Value>| value.and_then(|v| v.as_float().or(v.as_integer().map(|n| n as f64)));
    let model = format!("{MODEL}.");
    for path in paths(user).into_iter().filter(|path| path.starts_with(&model) && path != LONGEST) {
        let (wanted, found) = (at(user, &path), at(table, &path));
        let same = wanted == found || number(wanted.as_ref()).is_some_and(|n| Some(n) == number(found.as_ref()));
        if !same && !matches!(wanted, Some(Value::Table(_))) {
            let text = |value: Option<Value>| value.map_or("absent".into(), |value| value.to_string());
            let (wanted, found) = (text(wanted), text(found));
            let dir = dir.display();
            return Err(Error::Config(format!("{name}: {path} is {wanted}, but {found} in the model of {dir}")));
        }
    }
    Ok(())
}

fn parse(text: &str, name: &str) -> Result<Table> {
    text.parse::<Table>().map_err(|e| {
        let line = e.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        Error::Config(format!("{name}:{line}: {}", one_line(e.message())))
    })
}

fn from_table(table: Table) -> Result<Config> {
    serde_path_to_error::deserialize(Value::Table(table))
        .map_err(|e| Error::Config(format!("{}: {}", e.path(), plain(&one_line(e.inner().message())))))
}

fn one_line(message: &str) -> String {
    message.trim().replace('\n', "; ")
}

/// The family that a table names.
fn family(table: &Table) -> Option<String> {
    Some(table.get(MODEL)?.get(FAMILY)?.as_str()?.to_owned())
}

/// Every key's default for a family; that of [`DEFAULT`] if None.
fn defaults(family: Option<&str>) -> Result<Table> {
    let mut table = parse(DEFAULT, "configs/default.toml")?;
    let (name, text) = match FAMILIES.iter().find(|(name, _)| Some(*name) == family) {
        Some(found) => found,
        // An unknown one is refused, with the known ones, where the model's configuration is read.
        None => return Ok(table),
    };
    let family = parse(text, &format!("configs/{name}.toml"))?;
    table.remove(MODEL);
    overlay(&mut table, family);
    Ok(table)
}

/// `a.b=value` as nested tables.
fn parse_override(text: &str) -> Result<Table> {
    let (path, value) =
        text.split_once('=').ok_or_else(|| Error::Config(format!("--set {text}: expected section.key=value")))?;
    let parts = path.split('.').count();
    if parts > DEEPEST {
        return Err(Error::Config(format!("--set: a key of {parts} parts, expected at most {DEEPEST}")));
    }
    let one = || Error::Config(format!("--set {text}: expected one value; give --set for each key"));
    let value = match format!("value = {value}").parse::<Table>() {
        Ok(mut table) => table.remove("value").filter(|_| table.is_empty()).ok_or_else(one)?,
        // What is no TOML is a string, which goes on for one line.
        Err(_) if value.contains(['\n', '\r']) => return Err(one()),
        Err(_) => Value::String(value.to_owned()),
    };
    let nest = |inner, key: &str| Value::Table(Table::from_iter([(key.trim().to_owned(), inner)]));
    match path.split('.').rev().fold(value, nest) {
        Value::Table(table) => Ok(table),
        _ => unreachable!("a path has at least one part"),
    }
}

/// Puts the values of `top` over those of `base`.
fn overlay(base: &mut Table, top: Table) {
    for (key, value) in top {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(base)), Value::Table(top)) => overlay(base, top),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

/// Fails at the first key of `user` that a configuration like `table` does not have.
fn reject_unknown(user: &Table, table: &Table, name: &str) -> Result<()> {
    let mut known = paths(table);
    let family = family(table).unwrap_or_default();
    known.extend(ModelConfig::keys(&family).unwrap_or_default().iter().map(|key| format!("{MODEL}.{key}")));
    known.extend(ROPE_SCALING.iter().map(|key| format!("{MODEL}.rope_scaling.{key}")));
    let recorded = |path: &String| name != SET && ORIGIN.contains(&path.as_str());
    match paths(user).into_iter().find(|path| !known.contains(path) && !recorded(path)) {
        None => Ok(()),
        Some(path) => {
            let nearest = nearest(&path, &known).map_or(String::new(), |path| format!(", did you mean {path}?"));
            let of = if path.starts_with(MODEL) { format!(" of {family}") } else { String::new() };
            Err(Error::Config(format!("{name}: unknown key {path}{of}{nearest}")))
        }
    }
}

/// The known path that looks most like `unknown`: by its last part, one of the same section before others. None if none
/// looks like it.
fn nearest<'a>(unknown: &str, known: &'a BTreeSet<String>) -> Option<&'a str> {
    const SAME_SECTION: f64 = 0.1;
    const ALIKE: f64 = 0.8;
    let split = |path: &'a str| path.rsplit_once('.').unwrap_or(("", path));
    let (section, key) = unknown.rsplit_once('.').unwrap_or(("", unknown));
    let likeness = |path: &'a str| {
        let (its_section, its_key) = split(path);
        (strsim::jaro_winkler(its_key, key), if its_section == section { SAME_SECTION } else { 0.0 })
    };
    let alike = known.iter().map(|path| (likeness(path), path)).filter(|((alike, _), _)| *alike >= ALIKE);
    let nearest = alike.max_by(|((a, own), _), ((b, its), _)| (a + own).total_cmp(&(b + its)));
    nearest.map(|(_, path)| path.as_str())
}

/// Every section and key of a table, with its path.
fn paths(table: &Table) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    for (key, value) in table {
        out.insert(key.clone());
        if let Value::Table(inner) = value {
            out.extend(paths(inner).into_iter().map(|path| format!("{key}.{path}")));
        }
    }
    out
}
