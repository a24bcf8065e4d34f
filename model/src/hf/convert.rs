//! One model directory from another: experts separate or fused, another element type, other files. Tensors go through
//! memory a block at a time, and nothing is computed but the types.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use dropless_core::files;
use safetensors::Dtype;
use serde_json::json;

use super::blocks::SCALE_SUFFIX;
use super::config::{CONFIG, GENERATION_CONFIG, SpecialTokens};
use super::dir::ModelDir;
use super::elements;
use super::layout::{self, Experts, Layout, Stored};
use super::tensors::{Head, SELECTION_BIAS, Writing, write_streamed};
use super::weight_files::WeightFiles;
use crate::error::{Error, Result};
use crate::model::specs;

/// What becomes different; what is None stays as it is.
#[derive(Clone, Debug, Default)]
pub struct Conversion {
    /// How experts lie in the files.
    pub experts: Option<Experts>,
    /// Element type: F32, BF16 or F16. FP8 weights become F32 without it. Selection biases are never rounded: they become
    /// F32 with it, and stay as they are without.
    pub dtype: Option<Dtype>,
    /// Largest size of a file's tensors, in bytes; a larger tensor has a file of its own.
    pub shard_bytes: Option<u64>,
}

/// What a conversion wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Converted {
    /// Tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Files that hold them.
    pub files: usize,
}

/// A tensor to write: these parts of tensors, one after the other.
struct Outgoing {
    head: Head,
    parts: Vec<(String, Range<usize>)>,
    /// The file that holds the first of them.
    file: usize,
}

/// Writes `from` to the directory `out`, which must not exist: it appears when everything is written.
///
/// # Errors
/// [`Error::Checkpoint`] when `out` exists or names no directory, for a number that the new type cannot hold, and for
/// files that change meanwhile; [`Error::Io`]. What was written is removed again.
pub fn convert(from: &ModelDir, out: &Path, conversion: &Conversion) -> Result<Converted> {
    if out.symlink_metadata().is_ok() {
        return Err(Error::checkpoint(out, "exists already, and is not overwritten"));
    }
    let temporary = beside(out)?;
    fs::create_dir_all(&temporary).map_err(Error::io(&temporary))?;
    let done = write(from, &temporary, conversion)
        .and_then(|converted| fs::rename(&temporary, out).map_err(Error::io(out)).map(|()| converted));
    if done.is_err() {
        // The failure itself is what the caller has to know.
        let _ = fs::remove_dir_all(&temporary);
    }
    done
}

/// A directory beside `out`, also where that ends with a separator.
fn beside(out: &Path) -> Result<PathBuf> {
    let mut name = out.file_name().ok_or_else(|| Error::checkpoint(out, "names no new directory"))?.to_owned();
    name.push(format!(".tmp-{}", std::process::id()));
    Ok(out.with_file_name(name))
}

fn write(from: &ModelDir, dir: &Path, conversion: &Conversion) -> Result<Converted> {
    let weights = &from.weights;
    let outgoing = outgoing(from, conversion);
    let (tensors, bytes) = (outgoing.len(), outgoing.iter().map(|tensor| tensor.head.bytes() as u64).sum());
    let groups = groups(outgoing, conversion.shard_bytes);
    let name = |at: usize| match groups.len() {
        1 => "model.safetensors".to_owned(),
        of => format!("model-{:05}-of-{of:05}.safetensors", at + 1),
    };
    let mut map = BTreeMap::new();
    for (at, group) in groups.iter().enumerate() {
        let heads: Vec<Head> = group.iter().map(|tensor| tensor.head.clone()).collect();
        write_streamed(&dir.join(name(at)), &heads, |tensor, file| stream(weights, &group[tensor], file))?;
        map.extend(heads.into_iter().map(|head| (head.name, name(at))));
    }
    if groups.len() > 1 {
        let index = json!({ "metadata": { "total_size": bytes }, "weight_map": map });
        put(&dir.join("model.safetensors.index.json"), &format!("{index:#}\n"))?;
    }
    let quantized = weights.blocks().is_some();
    let dtype = conversion.dtype.or(quantized.then_some(Dtype::F32));
    put(&dir.join(CONFIG), &from.config.with_dtype(dtype.map(torch_name)))?;
    carry(&from.path, dir)?;
    let generation = dir.join(GENERATION_CONFIG);
    if !generation.exists() {
        put(&generation, &SpecialTokens::of(&from.config).generation_config())?;
    }
    Ok(Converted { tensors, bytes, files: groups.len() })
}

/// What `config.json` calls an element type.
fn torch_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::BF16 => "bfloat16",
        Dtype::F16 => "float16",
        _ => "float32",
    }
}

fn put(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Error::io(path))
}

/// Copies what else belongs to a model: its tokenizer and its generation settings.
fn carry(from: &Path, to: &Path) -> Result<()> {
    const NAMES: &[&str] =
        &[GENERATION_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"];
    const STARTS: &[&str] = &["tokenizer", "chat_template"];
    for entry in fs::read_dir(from).map_err(Error::io(from))? {
        let path = entry.map_err(Error::io(from))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if (NAMES.contains(&name) || STARTS.iter().any(|start| name.starts_with(start))) && !path.is_dir() {
            let (source, size) = files::open(&path)?;
            let target = to.join(name);
            let mut file = files::create(&target)?;
            std::io::copy(&mut source.take(size), &mut file).map_err(Error::io(&target))?;
        }
    }
    Ok(())
}

/// Every tensor of the new files: those of the model in its order, then those that it ignores.
fn outgoing(from: &ModelDir, conversion: &Conversion) -> Vec<Outgoing> {
    let weights = &from.weights;
    let model = from.config.model.architecture();
    let layout = Layout { experts: conversion.experts.unwrap_or(weights.layout().experts), ..weights.layout() };
    let stored = layout::stored(&specs(&model), &model.names, layout.experts);
    let piece = |Stored { name, shape, pieces }| {
        let parts = &weights.parts()[pieces];
        let parts = parts.iter().map(|part| (weights.holder(part).to_owned(), weights.place(part))).collect();
        tensor(weights, layout.in_file(&name), shape, parts, conversion.dtype)
    };
    let ignored = weights.ignored().iter().filter(|name| {
        // A scale goes where its weight goes.
        let scaled = name.strip_suffix(SCALE_SUFFIX).and_then(|weight| weights.files().find(weight));
        scaled.is_none_or(|weight| weight.dtype != Dtype::F8_E4M3)
    });
    let ignored = ignored.filter_map(|name| {
        let shape = weights.files().find(name)?.shape.to_vec();
        let all = 0..shape.iter().product();
        tensor(weights, name, shape, vec![(name.clone(), all)], conversion.dtype)
    });
    stored.into_iter().filter_map(piece).chain(ignored).collect()
}

fn tensor(
    weights: &WeightFiles,
    name: &str,
    shape: Vec<usize>,
    parts: Vec<(String, Range<usize>)>,
    wanted: Option<Dtype>,
) -> Option<Outgoing> {
    let mut dtypes = parts.iter().filter_map(|(name, _)| Some(weights.files().find(name)?.dtype));
    let first = dtypes.next()?;
    // Of several types, F32 alone holds all values.
    let own = if dtypes.all(|dtype| dtype == first) { first } else { Dtype::F32 };
    let quantized = own == Dtype::F8_E4M3;
    let dtype = match wanted {
        _ if !quantized && !elements::FLOATS.contains(&own) => own,
        Some(_) if name.ends_with(SELECTION_BIAS) => Dtype::F32,
        Some(dtype) => dtype,
        None if quantized => Dtype::F32,
        None => own,
    };
    let file = weights.files().find(&parts[0].0)?.file;
    Some(Outgoing { head: Head { name: name.to_owned(), dtype, shape }, parts, file })
}

/// The tensors of each file: as they lay in files before, or as many as fit. In a file the widest elements come first, so
/// that all are aligned.
fn groups(outgoing: Vec<Outgoing>, shard_bytes: Option<u64>) -> Vec<Vec<Outgoing>> {
    let mut groups: Vec<Vec<Outgoing>> = match shard_bytes {
        None => {
            let mut by_file: BTreeMap<usize, Vec<Outgoing>> = BTreeMap::new();
            for tensor in outgoing {
                by_file.entry(tensor.file).or_default().push(tensor);
            }
            by_file.into_values().collect()
        }
        Some(most) => {
            let mut groups = vec![Vec::new()];
            let mut bytes = 0u64;
            for tensor in outgoing {
                let more = tensor.head.bytes() as u64;
                if bytes > 0 && bytes.saturating_add(more) > most {
                    groups.push(Vec::new());
                    bytes = 0;
                }
                bytes += more;
                if let Some(group) = groups.last_mut() {
                    group.push(tensor);
                }
            }
            groups
        }
    };
    for group in &mut groups {
        group.sort_by_key(|tensor| std::cmp::Reverse(tensor.head.dtype.bitsize()));
    }
    groups
}

fn stream(weights: &WeightFiles, tensor: &Outgoing, file: &mut Writing<'_>) -> Result<()> {
    let dtype = tensor.head.dtype;
    for (name, place) in &tensor.parts {
        let same = weights.files().find(name).filter(|found| found.dtype == dtype);
        for from in place.clone().step_by(WeightFiles::CHUNK) {
            let to = place.end.min(from + WeightFiles::CHUNK);
            if let Some(found) = same {
                let size = elements::size(found.dtype);
                file.write(&weights.files().read(name, from * size, (to - from) * size)?)?;
                continue;
            }
            let values = weights.elements(name, from..to)?;
            let bytes = elements::encode(dtype, &values);
            check_range(weights, name, dtype, &values, &bytes)?;
            file.write(&bytes)?;
        }
    }
    Ok(())
}

/// A finite number that became infinite is another number.
fn check_range(weights: &WeightFiles, name: &str, dtype: Dtype, values: &[f32], bytes: &[u8]) -> Result<()> {
    let after = elements::decode(dtype, bytes).unwrap_or_default();
    match values.iter().zip(after).find(|(before, after)| before.is_finite() && !after.is_finite()) {
        None => Ok(()),
        Some((value, _)) => {
            Err(weights.files().bad(name, format!("has the value {value:e}, which {dtype} does not hold")))
        }
    }
}
