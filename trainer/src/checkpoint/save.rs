//! Writing a checkpoint so that at every moment, whatever happens, the newest complete one on disk can be used.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use dropless_core::{Backend, Group, files};
use dropless_model::hf::config::{CONFIG, GENERATION_CONFIG};
use dropless_model::hf::tensors::{self, FileRecord, NamedTensor};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{FOLDER, FORMAT, Manifest, STATE, State, digest, find};
use crate::collective::{agree, broadcast};
use crate::data::Kept;
use crate::error::{Error, Result};

/// One rank's part of a checkpoint. Each tensor is given by exactly one rank: replicated ones by the first, experts by
/// the first of those that hold them.
#[derive(Debug)]
pub struct Save<'a> {
    /// Directory of the run; the first rank's counts.
    pub out: &'a Path,
    /// Weights, under their Hugging Face names.
    pub weights: &'a [NamedTensor],
    /// Optimizer state.
    pub optimizer: &'a [NamedTensor],
    /// The same on every rank.
    pub state: &'a State,
    /// Number of checkpoints to keep; 0 for all.
    pub keep: usize,
}

/// A checkpoint that is safely on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Its directory.
    pub path: PathBuf,
    /// Hash over all weights and optimizer state.
    pub digest: String,
}

/// A rank among those that write.
#[derive(Clone, Copy)]
struct Part {
    rank: usize,
    of: usize,
}

/// What each of them tells the first rank about its files.
#[derive(Serialize, Deserialize)]
struct Contents {
    files: BTreeMap<String, FileRecord>,
    /// File and name of each weight and of each optimizer tensor.
    placed: BTreeMap<String, BTreeMap<String, String>>,
    hashes: Vec<(String, [u8; 32])>,
}

/// The longest such record: it has a line for each tensor.
const LONGEST_PART: u64 = 1 << 28;

const STEMS: [&str; 2] = ["model", "optimizer"];

/// Writes a checkpoint; every rank calls it. The first rank returns what was saved, the others None.
///
/// The ranks may live in different processes, but they see the same files: each writes its part to a temporary
/// directory, and when all have done so, the first rank makes it a checkpoint.
///
/// # Errors
/// [`Error::Io`] (for example a full disk) or [`Error::Checkpoint`] on a rank that failed, and
/// [`dropless_core::Error::Collective`] on the others. What was written is removed again, and older checkpoints are as
/// they were.
pub fn save(backend: &dyn Backend, save: &Save<'_>) -> Result<Option<Saved>> {
    const WORK: &str = "checkpoint";
    let path = directory(save.out, save.state.step);
    let temporary = with_suffix(&path, &format!(".tmp-{}", std::process::id()));
    let temporary = PathBuf::from(broadcast(backend, text(&temporary)?)?);
    let caps = backend.caps();
    let first = caps.rank == 0;
    // The other replicas of the experts have nothing to add.
    let part = (caps.place(Group::Replicas) == 0).then_some(Part { rank: caps.rank, of: caps.expert_ranks });
    let done = (|| {
        agree(backend, WORK, || if first { create(&temporary) } else { Ok(()) })?;
        agree(backend, WORK, || part.map_or(Ok(()), |part| write_part(save, part, &temporary)))?;
        agree(backend, WORK, || match first {
            true => finish(save, caps.expert_ranks, path, &temporary).map(Some),
            false => Ok(None),
        })
    })();
    if done.is_err() && first {
        // The failure itself is what the caller has to know.
        let _ = fs::remove_dir_all(&temporary);
    }
    done
}

/// A path that can be told to other ranks.
pub(crate) fn text(path: &Path) -> Result<&str> {
    path.to_str()
        .ok_or_else(|| Error::Usage(format!("{}: the name of a run's directory must be UTF-8", path.display())))
}

/// Where the checkpoint of a step of the run in `out` lies.
pub fn directory(out: &Path, step: u64) -> PathBuf {
    out.join(FOLDER).join(format!("step-{step:06}"))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn create(temporary: &Path) -> Result<()> {
    if temporary.exists() {
        fs::remove_dir_all(temporary).map_err(Error::io(temporary))?;
    }
    fs::create_dir_all(temporary).map_err(Error::io(temporary))
}

fn part_name(rank: usize) -> String {
    format!("part-{rank}.json")
}

fn write_part(save: &Save<'_>, part: Part, temporary: &Path) -> Result<()> {
    let mut contents = Contents { files: BTreeMap::new(), placed: BTreeMap::new(), hashes: Vec::new() };
    for (stem, tensors) in STEMS.into_iter().zip([save.weights, save.optimizer]) {
        let file = match part.of {
            1 => format!("{stem}.safetensors"),
            of => format!("{stem}-{:05}-of-{of:05}.safetensors", part.rank + 1),
        };
        contents.files.insert(file.clone(), tensors::write(&temporary.join(&file), tensors)?);
        let placed = tensors.iter().map(|t| (t.name.clone(), file.clone()));
        contents.placed.insert(stem.to_owned(), placed.collect());
        contents.hashes.extend(tensors.iter().map(|t| (t.name.clone(), t.hash())));
    }
    let json = serde_json::to_vec(&contents).unwrap_or_else(|e| unreachable!("plain data: {e}"));
    write_file(&temporary.join(part_name(part.rank)), &json).map(drop)
}

/// The first rank's work when all parts are written.
fn finish(save: &Save<'_>, parts: usize, path: PathBuf, temporary: &Path) -> Result<Saved> {
    let folder = save.out.join(FOLDER);
    let mut files = BTreeMap::new();
    let mut hashes = Vec::new();
    let mut placed: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    for rank in 0..parts {
        let path = temporary.join(part_name(rank));
        let text = files::read(&path, LONGEST_PART)?;
        let part: Contents = serde_json::from_slice(&text).map_err(|e| Error::checkpoint(&path, e.to_string()))?;
        fs::remove_file(&path).map_err(Error::io(&path))?;
        files.extend(part.files);
        hashes.extend(part.hashes);
        for (stem, tensors) in part.placed {
            for (tensor, file) in tensors {
                let second = file.clone();
                if let Some(first) = placed.entry(stem.clone()).or_default().insert(tensor.clone(), file) {
                    return Err(Error::checkpoint(temporary, format!("{tensor} is in both {first} and {second}")));
                }
            }
        }
    }
    if parts > 1 {
        for (stem, map) in &placed {
            let bytes: u64 = files.iter().filter(|(f, _)| f.starts_with(stem.as_str())).map(|(_, r)| r.bytes).sum();
            let index = json!({ "metadata": { "total_size": bytes }, "weight_map": map });
            let file = format!("{stem}.safetensors.index.json");
            files.insert(file.clone(), write_file(&temporary.join(file), format!("{index:#}\n").as_bytes())?);
        }
    }
    let config = &save.state.config;
    let kept = Kept::read(save.out)?;
    let tokens = kept.as_ref().map_or_else(|| config.special_tokens(), |kept| kept.tokens.clone());
    for (name, text) in [(CONFIG, config.model.to_hf(&tokens)), (GENERATION_CONFIG, tokens.generation_config())] {
        files.insert(name.into(), write_file(&temporary.join(name), text.as_bytes())?);
    }
    for (name, bytes) in kept.iter().flat_map(|kept| &kept.files) {
        files.insert((*name).into(), write_file(&temporary.join(name), bytes)?);
    }
    let state = save.state.clone();
    let mut manifest = Manifest { format: FORMAT, digest: digest(hashes), state, files, seal: String::new() };
    manifest.seal = manifest.expected_seal();
    let json = serde_json::to_string_pretty(&manifest).unwrap_or_else(|e| unreachable!("plain data: {e}"));
    write_file(&temporary.join(STATE), json.as_bytes())?;
    sync(temporary)?;
    if path.exists() {
        // A damaged checkpoint of this step, or one of a run that was resumed from an earlier step.
        retire(&path)?;
    }
    fs::rename(temporary, &path).map_err(Error::io(&path))?;
    sync(&folder)?;
    sync(save.out)?;
    if save.keep > 0 {
        // Later steps can only be damaged ones that this run was resumed before; they do not count.
        let old = find::steps(&folder)?.into_iter().rev().filter(|(step, _)| *step <= save.state.step);
        for (_, path) in old.skip(save.keep) {
            retire(&path)?;
        }
    }
    Ok(Saved { path, digest: manifest.digest })
}

/// Removes a checkpoint, first from view, so that one that is half removed is never taken for a damaged one.
fn retire(path: &Path) -> Result<()> {
    let hidden = with_suffix(path, &format!(".tmp-old-{}", std::process::id()));
    fs::rename(path, &hidden).map_err(Error::io(path))?;
    fs::remove_dir_all(&hidden).map_err(Error::io(&hidden))
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<FileRecord> {
    let mut file = files::create(path)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(Error::io(path))?;
    Ok(FileRecord { bytes: bytes.len() as u64, blake3: blake3::hash(bytes).to_hex().to_string() })
}

/// Makes the entries of a directory durable.
fn sync(dir: &Path) -> Result<()> {
    Ok(files::sync_directory(dir)?)
}
