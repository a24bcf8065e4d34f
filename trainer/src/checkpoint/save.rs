//! Writing a checkpoint so that at every moment, whatever happens, the newest complete one on disk can be used.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::tensors::{self, FileRecord, NamedTensor};
use super::{FOLDER, FORMAT, Manifest, STATE, State, digest, find};
use crate::error::{Error, Result};

/// Where the ranks of one process wait for each other and learn whether all of them succeeded.
#[derive(Clone, Debug)]
pub struct Meeting {
    barrier: Arc<Barrier>,
    failed: Arc<AtomicBool>,
}

impl Meeting {
    /// A meeting of this many ranks; each takes a clone.
    pub fn new(ranks: usize) -> Meeting {
        Meeting { barrier: Arc::new(Barrier::new(ranks)), failed: Arc::default() }
    }

    /// Waits for all ranks. False, for each of them, from the first failure of any on.
    pub fn all(&self, ok: bool) -> bool {
        if !ok {
            self.failed.store(true, Ordering::SeqCst);
        }
        self.barrier.wait();
        let ok = !self.failed.load(Ordering::SeqCst);
        // No rank may reach its next meeting, and fail there, before all have read this answer.
        self.barrier.wait();
        ok
    }
}

/// One rank's part of a checkpoint. Each tensor is given by exactly one rank: replicated ones by the first.
#[derive(Debug)]
pub struct Save<'a> {
    /// Directory of the run.
    pub out: &'a Path,
    /// This rank.
    pub rank: usize,
    /// All ranks.
    pub ranks: usize,
    /// Weights, under their Hugging Face names.
    pub weights: &'a [NamedTensor],
    /// Optimizer state.
    pub optimizer: &'a [NamedTensor],
    /// The same on every rank.
    pub state: &'a State,
    /// Checkpoints that stay; 0 for all.
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

/// What each rank tells the first one about its files.
#[derive(Serialize, Deserialize)]
struct Part {
    files: BTreeMap<String, FileRecord>,
    /// File and name of each weight and of each optimizer tensor.
    placed: BTreeMap<String, BTreeMap<String, String>>,
    hashes: Vec<(String, [u8; 32])>,
}

const STEMS: [&str; 2] = ["model", "optimizer"];

/// Writes a checkpoint; every rank calls it. The first rank returns what was saved, the others None.
///
/// # Errors
/// [`Error::Io`] (for example a full disk) or [`Error::Checkpoint`], on every rank. What was written is removed again,
/// and older checkpoints are as they were.
pub fn save(save: &Save<'_>, meeting: &Meeting) -> Result<Option<Saved>> {
    let folder = save.out.join(FOLDER);
    let name = format!("step-{:06}", save.state.step);
    let temporary = folder.join(format!("{name}.tmp-{}", std::process::id()));
    let first = save.rank == 0;
    let done = (|| {
        agree(meeting, &temporary, if first { create(&temporary) } else { Ok(()) })?;
        agree(meeting, &temporary, write_part(save, &temporary))?;
        let saved = if first { finish(save, &folder, &name, &temporary).map(Some) } else { Ok(None) };
        agree(meeting, &temporary, saved)
    })();
    if done.is_err() && first {
        // The failure itself is what the caller has to know.
        let _ = fs::remove_dir_all(&temporary);
    }
    done
}

/// The value, if every rank has one; else this rank's error, or that another rank failed.
fn agree<T>(meeting: &Meeting, path: &Path, mine: Result<T>) -> Result<T> {
    let all = meeting.all(mine.is_ok());
    let value = mine?;
    if all { Ok(value) } else { Err(Error::checkpoint(path, "another rank could not save its part")) }
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

fn write_part(save: &Save<'_>, temporary: &Path) -> Result<()> {
    let mut part = Part { files: BTreeMap::new(), placed: BTreeMap::new(), hashes: Vec::new() };
    for (stem, tensors) in STEMS.into_iter().zip([save.weights, save.optimizer]) {
        let file = match save.ranks {
            1 => format!("{stem}.safetensors"),
            ranks => format!("{stem}-{:05}-of-{ranks:05}.safetensors", save.rank + 1),
        };
        part.files.insert(file.clone(), tensors::write(&temporary.join(&file), tensors)?);
        let placed = tensors.iter().map(|t| (t.name.clone(), file.clone()));
        part.placed.insert(stem.to_owned(), placed.collect());
        part.hashes.extend(tensors.iter().map(|t| (t.name.clone(), t.hash())));
    }
    let json = serde_json::to_vec(&part).unwrap_or_else(|e| unreachable!("plain data: {e}"));
    write_file(&temporary.join(part_name(save.rank)), &json).map(drop)
}

/// The first rank's work when all parts are written.
fn finish(save: &Save<'_>, folder: &Path, name: &str, temporary: &Path) -> Result<Saved> {
    let mut files = BTreeMap::new();
    let mut hashes = Vec::new();
    let mut placed: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    for rank in 0..save.ranks {
        let path = temporary.join(part_name(rank));
        let text = fs::read(&path).map_err(Error::io(&path))?;
        let part: Part = serde_json::from_slice(&text).map_err(|e| Error::checkpoint(&path, e.to_string()))?;
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
    if save.ranks > 1 {
        for (stem, map) in &placed {
            let bytes: u64 = files.iter().filter(|(f, _)| f.starts_with(stem.as_str())).map(|(_, r)| r.bytes).sum();
            let index = json!({ "metadata": { "total_size": bytes }, "weight_map": map });
            let file = format!("{stem}.safetensors.index.json");
            files.insert(file.clone(), write_file(&temporary.join(file), format!("{index:#}\n").as_bytes())?);
        }
    }
    let config = save.state.config.model.to_hf();
    files.insert("config.json".into(), write_file(&temporary.join("config.json"), config.as_bytes())?);
    let state = save.state.clone();
    let mut manifest = Manifest { format: FORMAT, digest: digest(hashes), state, files, seal: String::new() };
    manifest.seal = manifest.expected_seal();
    let json = serde_json::to_string_pretty(&manifest).unwrap_or_else(|e| unreachable!("plain data: {e}"));
    write_file(&temporary.join(STATE), json.as_bytes())?;
    sync(temporary)?;
    let path = folder.join(name);
    if path.exists() {
        // A damaged checkpoint of this step, or one of a run that was resumed from an earlier step.
        retire(&path)?;
    }
    fs::rename(temporary, &path).map_err(Error::io(&path))?;
    sync(folder)?;
    sync(save.out)?;
    if save.keep > 0 {
        let old = find::steps(folder)?;
        for (_, path) in old.iter().rev().skip(save.keep) {
            retire(path)?;
        }
    }
    Ok(Saved { path, digest: manifest.digest })
}

/// Removes a checkpoint, first from view, so that one that is half removed is never taken for a damaged one.
fn retire(path: &Path) -> Result<()> {
    let mut hidden = path.as_os_str().to_owned();
    hidden.push(format!(".tmp-old-{}", std::process::id()));
    let hidden = PathBuf::from(hidden);
    fs::rename(path, &hidden).map_err(Error::io(path))?;
    fs::remove_dir_all(&hidden).map_err(Error::io(&hidden))
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<FileRecord> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(Error::io(path))?;
    Ok(FileRecord { bytes: bytes.len() as u64, blake3: blake3::hash(bytes).to_hex().to_string() })
}

/// Makes the entries of a directory durable.
fn sync(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io(dir))
}
