//! What this program makes in the folder of checkpoints, by its names: nothing else is ever removed there.
//!
//! A checkpoint that is not complete yet is `step-N.tmp-PROCESS`, one that is being removed `step-N.tmp-old-PROCESS`.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use dropless_model::hf::config::{CONFIG, GENERATION_CONFIG};

use super::{FOLDER, STATE, Stem, find};
use crate::data::tokenizer::COPIED;
use crate::error::{Error, Result};

const MARK: &str = ".tmp-";
const OLD: &str = "old-";

/// The name of the checkpoint at `path` while that process writes it.
pub(super) fn incomplete(path: &Path, process: u32) -> PathBuf {
    with_suffix(path, &format!("{MARK}{process}"))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Whether a directory of this name is a checkpoint that was not completed, or not removed to its end.
fn is_left_over(name: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.strip_prefix("step-").and_then(|rest| rest.split_once(MARK));
    parts.is_some_and(|(step, process)| digits(step) && digits(process.strip_prefix(OLD).unwrap_or(process)))
}

/// Whether a file of this name may be one of a checkpoint's.
fn is_of_checkpoint(name: &str) -> bool {
    let tensors = |stem: Stem| stem.has(name) || (stem.begins(name) && name.ends_with(".safetensors.index.json"));
    let part = name.strip_prefix("part-").and_then(|rest| rest.strip_suffix(".json"));
    [STATE, CONFIG, GENERATION_CONFIG].contains(&name)
        || COPIED.contains(&name)
        || part.is_some_and(|rank| rank.parse::<usize>().is_ok())
        || Stem::ALL.into_iter().any(tensors)
}

/// Removes a checkpoint, first from view, so that one that is half removed is never taken for a damaged one.
pub(super) fn retire(path: &Path) -> Result<()> {
    let hidden = with_suffix(path, &format!("{MARK}{OLD}{}", std::process::id()));
    fs::rename(path, &hidden).map_err(Error::io(path))?;
    // With someone's own files in it, it stays under that name, and the next start says so.
    remove(&hidden).map(drop)
}

/// Removes the files of a checkpoint from a directory, and the directory if nothing else is in it; returns whether it
/// is gone.
pub(super) fn remove(directory: &Path) -> Result<bool> {
    for path in find::entries(directory)? {
        let own = path.file_name().and_then(|name| name.to_str()).is_some_and(is_of_checkpoint);
        if own && !is_directory(&path) {
            fs::remove_file(&path).map_err(Error::io(&path))?;
        }
    }
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(false),
        done => done.map(|()| true).map_err(Error::io(directory)),
    }
}

/// Whether it is a directory, and not a link to one.
fn is_directory(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir())
}

/// Whether nothing is in the folder of checkpoints but what an interrupted save left, or it is not there.
pub(crate) fn holds_nothing(folder: &Path) -> bool {
    // A link that leads nowhere is there, and may lead to checkpoints.
    let there = folder.symlink_metadata().is_ok();
    !there || find::entries(folder).is_ok_and(|entries| entries.iter().all(|path| is_incomplete(path)))
}

/// Whether it is a directory that an interrupted save left.
fn is_incomplete(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(is_left_over) && is_directory(path)
}

/// Removes what an interrupted save left in the run in `out`, and says so in a line for each directory. For the process
/// that holds the run.
///
/// # Errors
/// [`Error::Io`].
pub fn remove_incomplete(out: &Path) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for path in find::entries(&out.join(FOLDER))? {
        if is_incomplete(&path) {
            notes.push(match remove(&path)? {
                true => format!("removed {}, which an interrupted save left behind", path.display()),
                false => format!("kept {}, which holds files that are not of a checkpoint", path.display()),
            });
        }
    }
    Ok(notes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f01_own_names_are_told_from_foreign_ones() {
        for name in ["step-000006.tmp-17", "step-000006.tmp-old-17", "step-1234567.tmp-1"] {
            assert!(is_left_over(name), "{name}");
        }
        for name in ["step-000006", "step-6.tmp-mine", "step-6.tmp-", "step-6.tmp-old-", "step-.tmp-1", "a.tmp-1"] {
            assert!(!is_left_over(name), "{name}");
        }
        let shard = "optimizer-00001-of-00002.safetensors";
        for name in ["state.json", "part-3.json", "model.safetensors", shard, "tokenizer.json"] {
            assert!(is_of_checkpoint(name), "{name}");
        }
        for name in ["notes.txt", "part-a.json", "models.safetensors", "model.bin", "expected.safetensors"] {
            assert!(!is_of_checkpoint(name), "{name}");
        }
    }
}
