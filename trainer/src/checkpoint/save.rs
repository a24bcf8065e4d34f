//! Writing a checkpoint so that at every moment, whatever happens, the newest complete one on disk can be used.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use dropless_core::Error as CoreError;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::tensors::{self, FileRecord, NamedTensor};
use super::{FOLDER, FORMAT, Manifest, STATE, State, digest, find};
use crate::error::{Error, Result};

/// Where the ranks of one process wait for each other and learn whether all of them succeeded.
#[derive(Debug)]
pub struct Meeting {
    ranks: usize,
    state: Mutex<Rounds>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Rounds {
    /// Ranks that wait in the round that is open.
    arrived: usize,
    /// Rounds that are over.
    over: u64,
    /// Whether any rank failed or left, ever.
    failed: bool,
    /// Whether a rank left: no later round can end.
    left: bool,
    /// What the last round came to. The next one cannot end before every rank has read this.
    outcome: bool,
}

/// A rank's part in a [`Meeting`]. A rank that drops it, however it ends, is waited for no more.
#[derive(Debug)]
pub struct Seat<'a>(&'a Meeting);

impl Meeting {
    /// A meeting of this many ranks.
    pub fn new(ranks: usize) -> Meeting {
        Meeting { ranks, state: Mutex::default(), changed: Condvar::new() }
    }

    /// One for each rank, to be held as long as the rank may come.
    pub fn seat(&self) -> Seat<'_> {
        Seat(self)
    }

    fn state(&self) -> MutexGuard<'_, Rounds> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for all ranks. False, for each of them, from the first failure of any on, or when a rank is gone.
    fn all(&self, ok: bool) -> bool {
        let mut state = self.state();
        state.failed |= !ok;
        state.arrived += 1;
        if state.arrived == self.ranks {
            state.arrived = 0;
            state.over += 1;
            state.outcome = !state.failed;
            self.changed.notify_all();
            return state.outcome;
        }
        let round = state.over;
        while state.over == round {
            if state.left {
                return false;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.outcome
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        (state.failed, state.left) = (true, true);
        self.0.changed.notify_all();
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
/// [`Error::Io`] (for example a full disk) or [`Error::Checkpoint`] on a rank that failed, and
/// [`dropless_core::Error::Collective`] on the others. What was written is removed again, and older checkpoints are as
/// they were.
pub fn save(save: &Save<'_>, meeting: &Meeting) -> Result<Option<Saved>> {
    let (folder, path) = (save.out.join(FOLDER), directory(save.out, save.state.step));
    let temporary = with_suffix(&path, &format!(".tmp-{}", std::process::id()));
    let first = save.rank == 0;
    let done = (|| {
        agree(meeting, save.rank, if first { create(&temporary) } else { Ok(()) })?;
        agree(meeting, save.rank, write_part(save, &temporary))?;
        let saved = if first { finish(save, &folder, path, &temporary).map(Some) } else { Ok(None) };
        agree(meeting, save.rank, saved)
    })();
    if done.is_err() && first {
        // The failure itself is what the caller has to know.
        let _ = fs::remove_dir_all(&temporary);
    }
    done
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

/// The value, if every rank has one; else this rank's error, or that another rank failed.
fn agree<T>(meeting: &Meeting, rank: usize, mine: Result<T>) -> Result<T> {
    let all = meeting.all(mine.is_ok());
    let value = mine?;
    let elsewhere = || CoreError::Collective { rank, op: "checkpoint", what: "another rank could not save".into() };
    if all { Ok(value) } else { Err(Error::Core(elsewhere())) }
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
fn finish(save: &Save<'_>, folder: &Path, path: PathBuf, temporary: &Path) -> Result<Saved> {
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
    if path.exists() {
        // A damaged checkpoint of this step, or one of a run that was resumed from an earlier step.
        retire(&path)?;
    }
    fs::rename(temporary, &path).map_err(Error::io(&path))?;
    sync(folder)?;
    sync(save.out)?;
    if save.keep > 0 {
        // Later steps can only be damaged ones that this run was resumed before; they do not count.
        let old = find::steps(folder)?.into_iter().rev().filter(|(step, _)| *step <= save.state.step);
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
