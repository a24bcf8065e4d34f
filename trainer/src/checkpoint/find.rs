//! Finding the newest or the best checkpoint that can be used, and reading one.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dropless_core::files;
use dropless_model::hf::tensors::FileRecord;
use dropless_model::hf::{OpenFile, TensorFiles, WeightFiles};

use super::{FOLDER, FORMAT, Manifest, STATE, State, Stem};
use dropless_model::words::plain;

use crate::error::{Error, Result};

/// The longest record of a checkpoint: it has a line for each of its files. What it becomes in memory is many times
/// larger.
const LONGEST_STATE: u64 = 1 << 24;

/// A complete, undamaged checkpoint. Its files are open: a run that goes on may remove it meanwhile.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its directory.
    pub path: PathBuf,
    /// What a run needs to resume.
    pub state: State,
    /// Hash over all weights and optimizer state.
    pub digest: String,
    /// Weights.
    pub weights: TensorFiles,
    /// Optimizer state.
    pub optimizer: TensorFiles,
    /// All files but the record.
    files: BTreeMap<String, Arc<OpenFile>>,
}

/// What [`newest`] or [`best`] found.
#[derive(Debug)]
pub struct Found {
    /// The undamaged checkpoint.
    pub checkpoint: Option<Checkpoint>,
    /// A line for each directory that was skipped, and why.
    pub notes: Vec<String>,
}

impl Checkpoint {
    /// Opens a checkpoint and compares every file with its recorded size and hash.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] or [`Error::Io`], naming the file and what is wrong with it.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let manifest = manifest(path)?;
        let files = opened(path, &manifest)?;
        for (name, file) in &files {
            if file.record()?.blake3 != manifest.files[name].blake3 {
                return Err(Error::checkpoint(file.path(), "is damaged: its contents are not what was written"));
            }
        }
        Checkpoint::described(path, manifest, files)
    }

    /// Opens a checkpoint that another process has compared with its record.
    ///
    /// # Errors
    /// As [`open`](Checkpoint::open), as far as damage shows.
    pub fn reopen(path: &Path) -> Result<Checkpoint> {
        let manifest = manifest(path)?;
        let files = opened(path, &manifest)?;
        Checkpoint::described(path, manifest, files)
    }

    /// The contents of one of its files, if it has one of that name.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.files.get(name).map(|file| file.read()).transpose()?)
    }

    /// Of all its files but the record.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.values().map(|file| file.bytes()).sum()
    }

    /// The weights by the pieces of the model.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the tensors that do not fit the configuration.
    pub fn mapped(&self) -> Result<WeightFiles> {
        Ok(WeightFiles::find(self.weights.clone(), &self.state.config.model.architecture(), None)?)
    }

    fn described(path: &Path, manifest: Manifest, files: BTreeMap<String, Arc<OpenFile>>) -> Result<Checkpoint> {
        let tensors = |stem: Stem| {
            let own = files.iter().filter(|(name, _)| stem.has(name)).map(|(_, file)| file.clone());
            match own.collect::<Vec<_>>() {
                none if none.is_empty() => {
                    Err(Error::checkpoint(path, format!("is damaged: it has no {}.safetensors", stem.name())))
                }
                own => Ok(TensorFiles::of(own)?),
            }
        };
        let (weights, optimizer) = (tensors(Stem::Weights)?, tensors(Stem::Optimizer)?);
        let Manifest { state, digest, .. } = manifest;
        Ok(Checkpoint { path: path.to_owned(), state, digest, weights, optimizer, files })
    }
}

/// The files of a checkpoint, all of which are opened, and have the sizes of the record.
fn opened(path: &Path, manifest: &Manifest) -> Result<BTreeMap<String, Arc<OpenFile>>> {
    let open = |(name, expected): (&String, &FileRecord)| {
        // A size is compared before anything is read: the file may be a device or a hole of any length.
        let file = OpenFile::open(&path.join(name))?;
        if file.bytes() != expected.bytes {
            let what = format!("is damaged: it has {} bytes, but {} were written", file.bytes(), expected.bytes);
            return Err(Error::checkpoint(file.path(), what));
        }
        Ok((name.clone(), Arc::new(file)))
    };
    manifest.files.iter().map(open).collect()
}

/// The record of a checkpoint, as it was written.
fn manifest(path: &Path) -> Result<Manifest> {
    let file = path.join(STATE);
    let text = files::read(&file, LONGEST_STATE)?;
    let damaged = |e: serde_json::Error| Error::checkpoint(&file, format!("is damaged: {}", plain(&e.to_string())));
    let value: serde_json::Value = serde_json::from_slice(&text).map_err(damaged)?;
    match value.get("format").and_then(serde_json::Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => {}
        Some(format) => {
            return Err(Error::checkpoint(&file, format!("has format {format}, this program reads {FORMAT}")));
        }
        None => return Err(Error::checkpoint(&file, "is damaged: it names no format")),
    }
    let manifest: Manifest = serde_json::from_value(value).map_err(damaged)?;
    if manifest.seal != manifest.expected_seal() {
        return Err(Error::checkpoint(&file, "is damaged: its contents are not what was written"));
    }
    Ok(manifest)
}

/// The newest undamaged checkpoint of the run in `out`. Nothing is changed there: the run may still be saving.
///
/// # Errors
/// [`Error::Checkpoint`] when there are checkpoints but none is undamaged, naming the newest; [`Error::Io`].
pub fn newest(out: &Path) -> Result<Found> {
    let folder = out.join(FOLDER);
    loop {
        let newest_first: Vec<PathBuf> = steps(&folder)?.into_iter().rev().map(|(_, path)| path).collect();
        let found = first_undamaged(&folder, &newest_first, "the previous checkpoint");
        let newest = newest_first.first();
        let is_newest = found.as_ref().is_ok_and(|found| found.checkpoint.as_ref().map(|c| &c.path) == newest);
        // A run that goes on removes its old checkpoints, also one that is being read; it has a newer one then.
        if is_newest || newest.is_none_or(|path| path.symlink_metadata().is_ok()) {
            return found;
        }
    }
}

/// The undamaged checkpoint of the run in `out` with the lowest validation loss, of those whose step was validated.
///
/// # Errors
/// As [`newest`].
pub fn best(out: &Path) -> Result<Found> {
    let folder = out.join(FOLDER);
    let paths: Vec<PathBuf> = steps(&folder)?.into_iter().map(|(_, path)| path).collect();
    first_undamaged(&folder, &by_validation_loss(&paths), "the next best checkpoint")
}

/// The first of these that is undamaged; `next` says what is tried instead of one that is not.
fn first_undamaged(folder: &Path, paths: &[PathBuf], next: &str) -> Result<Found> {
    let mut notes = Vec::new();
    let mut first_error = None;
    for path in paths {
        match Checkpoint::open(path) {
            Ok(checkpoint) => return Ok(Found { checkpoint: Some(checkpoint), notes }),
            Err(error) => {
                notes.push(format!("warning: {error}; trying {next}"));
                first_error.get_or_insert(error);
            }
        }
    }
    match first_error {
        None => Ok(Found { checkpoint: None, notes }),
        Some(error) => Err(Error::checkpoint(folder, format!("no checkpoint is undamaged; of the first, {error}"))),
    }
}

/// Those of the checkpoints whose step was validated, the one with the lowest loss first and of equal ones the latest.
/// `paths` has the oldest first.
pub(super) fn by_validation_loss(paths: &[PathBuf]) -> Vec<PathBuf> {
    let loss = |path: &PathBuf| Some((manifest(path).ok()?.state.validation_loss?, path.clone()));
    let mut validated: Vec<(f64, PathBuf)> = paths.iter().rev().filter_map(loss).collect();
    validated.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    validated.into_iter().map(|(_, path)| path).collect()
}

/// Complete checkpoints, the oldest first.
pub(crate) fn steps(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let step = |path: PathBuf| {
        let step = path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()?;
        Some((step, path))
    };
    let mut steps: Vec<_> = entries(folder)?.into_iter().filter_map(step).collect();
    steps.sort();
    Ok(steps)
}

/// The newest checkpoint of the run in `out` whose record is undamaged, and that record.
///
/// # Errors
/// [`Error::Io`].
pub fn newest_state(out: &Path) -> Result<Option<(PathBuf, State)>> {
    let newest_first = steps(&out.join(FOLDER))?.into_iter().rev();
    Ok(newest_first.map(|(_, path)| path).find_map(|path| Some((path.clone(), manifest(&path).ok()?.state))))
}

/// What is in a directory; nothing if it is not there. A link that leads nowhere is there.
pub(super) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound && !folder.is_symlink() => return Ok(Vec::new()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let what = "is a link that leads nowhere: is the storage it leads to mounted?";
            return Err(Error::checkpoint(folder, what));
        }
        entries => entries.map_err(Error::io(folder))?,
    };
    entries.map(|entry| Ok(entry.map_err(Error::io(folder))?.path())).collect()
}
