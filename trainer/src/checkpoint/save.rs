//! Writing a checkpoint so that at every moment, whatever happens, the newest complete one on disk can be used.
//!
//! Every rank writes its part, and when all have done so, the first rank finishes. Neither step uses the ranks'
//! exchange, so both can run beside the training. The ranks may live in different processes, but they see the same
//! files.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use dropless_core::{Backend, files};
use dropless_model::hf::config::{CONFIG, GENERATION_CONFIG};
use dropless_model::hf::tensors::{self, FileRecord, Head, NamedTensor};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{FOLDER, FORMAT, Manifest, STATE, State, digest, find, own};
use crate::collective::{agree, broadcast};
use crate::data::Kept;
use crate::error::{Error, Result};

/// What a file of a checkpoint holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stem {
    /// Weights, under their Hugging Face names.
    Weights,
    /// Optimizer state.
    Optimizer,
}

impl Stem {
    /// Both.
    pub const ALL: [Stem; 2] = [Stem::Weights, Stem::Optimizer];

    /// What the names of its files begin with.
    pub const fn name(self) -> &'static str {
        match self {
            Stem::Weights => "model",
            Stem::Optimizer => "optimizer",
        }
    }

    /// Whether a file of this name has some of its tensors.
    pub(super) fn has(self, name: &str) -> bool {
        self.begins(name) && name.ends_with(".safetensors")
    }

    /// Whether the name begins as those of its files.
    pub(super) fn begins(self, name: &str) -> bool {
        name.strip_prefix(self.name()).is_some_and(|rest| rest.starts_with(['.', '-']))
    }
}

/// The tensors of one rank's part. Each tensor is given by exactly one rank, which holds it.
pub trait Contents: Sync {
    /// Those of a file, in its order.
    fn heads(&self, stem: Stem) -> Vec<Head>;

    /// Gives the bytes of one of them to `out`, in as many pieces as it likes.
    ///
    /// # Errors
    /// Those of whatever holds them, and of `out`.
    fn bytes(&self, stem: Stem, at: usize, out: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>;
}

/// A checkpoint to write, as one rank knows it.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Directory of the run, the same on every rank.
    pub(crate) out: PathBuf,
    /// The first rank's process, for the temporary name.
    pub(crate) process: u32,
    /// The same on every rank.
    pub(crate) state: State,
    /// Number of checkpoints to keep beside the best; 0 for all.
    pub(crate) keep: usize,
    /// This rank.
    pub(crate) rank: usize,
    /// Number of ranks.
    pub(crate) ranks: usize,
}

/// A checkpoint that is safely on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Its directory.
    pub path: PathBuf,
    /// Hash over all weights and optimizer state.
    pub digest: String,
}

/// What a rank tells the first one about its part.
#[derive(Serialize, Deserialize)]
struct PartRecord {
    /// By stem; a rank other than the first has no file for nothing.
    files: BTreeMap<String, FileRecord>,
    /// Name and hash of each tensor, by stem.
    tensors: BTreeMap<String, Vec<(String, [u8; 32])>>,
}

/// The longest [`PartRecord`].
const LONGEST_RECORD: u64 = 1 << 28;

/// Where the checkpoint of a step of the run in `out` lies.
pub fn directory(out: &Path, step: u64) -> PathBuf {
    out.join(FOLDER).join(format!("step-{step:06}"))
}

/// A path that can be told to other ranks.
pub(crate) fn text(path: &Path) -> Result<&str> {
    path.to_str()
        .ok_or_else(|| Error::Usage(format!("{}: the name of a run's directory must be UTF-8", path.display())))
}

impl Plan {
    fn path(&self) -> PathBuf {
        directory(&self.out, self.state.step)
    }

    /// Where the files lie until the checkpoint is complete.
    fn temporary(&self) -> PathBuf {
        own::incomplete(&self.path(), self.process)
    }

    fn part_file(&self, stem: Stem, rank: usize) -> PathBuf {
        self.temporary().join(format!("{}-part-{rank}.safetensors", stem.name()))
    }

    fn part_record(&self, rank: usize) -> PathBuf {
        self.temporary().join(format!("part-{rank}.json"))
    }

    /// Writes this rank's part; returns its size. The record comes last.
    pub(crate) fn write_part(&self, contents: &dyn Contents) -> Result<u64> {
        let temporary = self.temporary();
        fs::create_dir_all(&temporary).map_err(Error::io(&temporary))?;
        let mut record = PartRecord { files: BTreeMap::new(), tensors: BTreeMap::new() };
        for stem in Stem::ALL {
            let heads = contents.heads(stem);
            let mut hashes = Vec::with_capacity(heads.len());
            if heads.is_empty() && self.rank != 0 {
                continue;
            }
            let file = tensors::write_streamed(&self.part_file(stem, self.rank), &heads, |at, out| {
                let mut hasher = heads[at].hasher();
                contents.bytes(stem, at, &mut |bytes| {
                    hasher.update(bytes);
                    Ok(out.write(bytes)?)
                })?;
                hashes.push((heads[at].name.clone(), *hasher.finalize().as_bytes()));
                Ok::<(), Error>(())
            })?;
            record.files.insert(stem.name().to_owned(), file);
            record.tensors.insert(stem.name().to_owned(), hashes);
        }
        let json = serde_json::to_vec(&record).unwrap_or_else(|e| unreachable!("plain data: {e}"));
        write_file(&self.part_record(self.rank), &json)?;
        Ok(record.files.values().map(|file| file.bytes).sum())
    }

    /// Makes the parts a checkpoint, when all of them are written; returns its size, too. For the first rank.
    pub(crate) fn finish(&self) -> Result<(Saved, u64)> {
        let (temporary, path, folder) = (self.temporary(), self.path(), self.out.join(FOLDER));
        let mut written = BTreeMap::new();
        let mut hashes = Vec::new();
        let parts = self.parts()?;
        for stem in Stem::ALL {
            let (found, placed) = self.join(stem, &parts)?;
            hashes.extend(parts.iter().filter_map(|part| part.tensors.get(stem.name())).flatten().cloned());
            if found.len() > 1 {
                let bytes: u64 = found.values().map(|file| file.bytes).sum();
                let index = json!({ "metadata": { "total_size": bytes }, "weight_map": placed });
                let file = format!("{}.safetensors.index.json", stem.name());
                written.insert(file.clone(), write_file(&temporary.join(file), format!("{index:#}\n").as_bytes())?);
            }
            written.extend(found);
        }
        let config = &self.state.config;
        let kept = Kept::read(&self.out)?;
        let tokens = kept.as_ref().map_or_else(|| config.special_tokens(), |kept| kept.tokens.clone());
        for (name, text) in [(CONFIG, config.model.to_hf(&tokens)), (GENERATION_CONFIG, tokens.generation_config())] {
            written.insert(name.into(), write_file(&temporary.join(name), text.as_bytes())?);
        }
        for (name, bytes) in kept.iter().flat_map(|kept| &kept.files) {
            written.insert((*name).into(), write_file(&temporary.join(name), bytes)?);
        }
        let bytes = written.values().map(|file| file.bytes).sum();
        let state = self.state.clone();
        let mut manifest =
            Manifest { format: FORMAT, digest: digest(hashes), state, files: written, seal: String::new() };
        manifest.seal = manifest.expected_seal();
        let json = serde_json::to_string_pretty(&manifest).unwrap_or_else(|e| unreachable!("plain data: {e}"));
        write_file(&temporary.join(STATE), json.as_bytes())?;
        files::sync_directory(&temporary)?;
        if path.exists() {
            // A damaged checkpoint of this step, or one of a run that was resumed from an earlier step.
            own::retire(&path)?;
        }
        fs::rename(&temporary, &path).map_err(Error::io(&path))?;
        files::sync_directory(&folder)?;
        files::sync_directory(&self.out)?;
        self.retire_old(&folder)?;
        Ok((Saved { path, digest: manifest.digest }, bytes))
    }

    /// The records of all parts, which go.
    fn parts(&self) -> Result<Vec<PartRecord>> {
        let read = |rank| {
            let path = self.part_record(rank);
            let text = files::read(&path, LONGEST_RECORD)?;
            let record = serde_json::from_slice(&text).map_err(|e| Error::checkpoint(&path, e.to_string()))?;
            fs::remove_file(&path).map_err(Error::io(&path))?;
            Ok(record)
        };
        (0..self.ranks).map(read).collect()
    }

    /// Gives the parts of a stem the names of shards, or of a single file; returns them, and the file of each tensor.
    fn join(
        &self,
        stem: Stem,
        parts: &[PartRecord],
    ) -> Result<(BTreeMap<String, FileRecord>, BTreeMap<String, String>)> {
        let (mut files, mut placed): (_, BTreeMap<String, String>) = (BTreeMap::new(), BTreeMap::new());
        let holds = |part: &PartRecord| part.tensors.get(stem.name()).is_some_and(|tensors| !tensors.is_empty());
        let of = parts.iter().filter(|part| holds(part)).count();
        for (rank, part) in parts.iter().enumerate() {
            let Some(record) = part.files.get(stem.name()) else { continue };
            let from = self.part_file(stem, rank);
            if of > 0 && !holds(part) {
                fs::remove_file(&from).map_err(Error::io(&from))?;
                continue;
            }
            let file = match of {
                0 | 1 => format!("{}.safetensors", stem.name()),
                of => format!("{}-{:05}-of-{of:05}.safetensors", stem.name(), files.len() + 1),
            };
            for (tensor, _) in part.tensors.get(stem.name()).into_iter().flatten() {
                if let Some(first) = placed.insert(tensor.clone(), file.clone()) {
                    let what = format!("{tensor} is in both {first} and {file}");
                    return Err(Error::checkpoint(self.temporary(), what));
                }
            }
            let to = self.temporary().join(&file);
            fs::rename(&from, &to).map_err(Error::io(&to))?;
            files.insert(file, record.clone());
        }
        Ok((files, placed))
    }

    /// Removes what is neither among the newest nor the best by validation loss.
    fn retire_old(&self, folder: &Path) -> Result<()> {
        if self.keep == 0 {
            return Ok(());
        }
        // Later steps can only be damaged ones that this run was resumed before; they do not count.
        let steps = find::steps(folder)?.into_iter().filter(|(step, _)| *step <= self.state.step);
        let paths: Vec<PathBuf> = steps.map(|(_, path)| path).collect();
        let old = &paths[..paths.len().saturating_sub(self.keep)];
        if old.is_empty() {
            return Ok(());
        }
        let best = find::by_validation_loss(&paths).into_iter().next();
        old.iter().filter(|path| best.as_ref() != Some(path)).try_for_each(|path| own::retire(path))
    }

    /// Removes what was written of a checkpoint that will not be complete.
    pub(crate) fn discard(&self) {
        // The failure that led here is what the caller has to know.
        let _ = own::remove(&self.temporary());
    }
}

/// A whole part in memory, to be saved at once.
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
    /// Number of checkpoints to keep beside the best; 0 for all.
    pub keep: usize,
}

impl Save<'_> {
    fn tensors(&self, stem: Stem) -> &[NamedTensor] {
        match stem {
            Stem::Weights => self.weights,
            Stem::Optimizer => self.optimizer,
        }
    }
}

impl Contents for Save<'_> {
    fn heads(&self, stem: Stem) -> Vec<Head> {
        self.tensors(stem).iter().map(NamedTensor::head).collect()
    }

    fn bytes(&self, stem: Stem, at: usize, out: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        out(&self.tensors(stem)[at].bytes)
    }
}

/// Writes a checkpoint and waits for it; every rank calls it. The first rank returns what was saved, the others None.
///
/// # Errors
/// [`Error::Io`] (for example a full disk) or [`Error::Checkpoint`] on a rank that failed, and
/// [`dropless_core::Error::Collective`] on the others. What was written is removed again, and older checkpoints are as
/// they were.
pub fn save(backend: &dyn Backend, save: &Save<'_>) -> Result<Option<Saved>> {
    const WORK: &str = "checkpoint";
    let caps = backend.caps();
    let first = caps.rank == 0;
    let (out, process) = origin(backend, save.out)?;
    let state = save.state.clone();
    let plan = Plan { out, process, state, keep: save.keep, rank: caps.rank, ranks: caps.ranks };
    let done = agree(backend, WORK, || plan.write_part(save)).and_then(|_| {
        agree(backend, WORK, || if first { plan.finish().map(|(saved, _)| Some(saved)) } else { Ok(None) })
    });
    if done.is_err() && first {
        plan.discard();
    }
    done
}

/// The run's directory and the process, of the first rank.
pub(crate) fn origin(backend: &dyn Backend, out: &Path) -> Result<(PathBuf, u32)> {
    let mine = if backend.caps().rank == 0 { format!("{} {}", std::process::id(), text(out)?) } else { String::new() };
    let first = broadcast(backend, &mine)?;
    let (process, out) = first.split_once(' ').unwrap_or_else(|| unreachable!("sent as two words: {first}"));
    Ok((out.into(), process.parse().unwrap_or_else(|e| unreachable!("sent as a number: {e}"))))
}

pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<FileRecord> {
    let mut file = files::create(path)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(Error::io(path))?;
    Ok(FileRecord { bytes: bytes.len() as u64, blake3: blake3::hash(bytes).to_hex().to_string() })
}
