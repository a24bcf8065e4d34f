//! The directories of runs: `out/run-1`, `out/run-2` and so on, unless `--out` names one.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::train::{CONFIG, LOCK};

/// Where runs without `--out` go.
const PARENT: &str = "out";

/// The directory of a new run. One that holds a run already is refused, so that nothing is overwritten.
pub(super) fn new(out: Option<&Path>) -> Result<PathBuf> {
    if let Some(out) = out {
        if ["checkpoints", CONFIG, "metrics.jsonl"].iter().any(|name| out.join(name).exists()) {
            let out = out.display();
            return Err(Error::Usage(format!(
                "--out {out} holds a run already: add --resume to continue it, or name another directory"
            )));
        }
        fs::create_dir_all(out).map_err(Error::io(out))?;
        return Ok(out.to_owned());
    }
    let parent = Path::new(PARENT);
    fs::create_dir_all(parent).map_err(Error::io(parent))?;
    let mut number = numbers()?.last().map_or(1, |(n, _)| n + 1);
    loop {
        let path = parent.join(format!("run-{number}"));
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            // Another run took the number in between.
            Err(e) if e.kind() == ErrorKind::AlreadyExists => number += 1,
            Err(e) => return Err(Error::io(path)(e)),
        }
    }
}

/// Removes the directory of a run that failed before it began: nothing is in it but the lock.
pub(super) fn remove_if_not_begun(out: &Path) {
    if !out.join(CONFIG).exists() {
        // What cannot be removed does no harm.
        let _ = fs::remove_file(out.join(LOCK));
        let _ = fs::remove_dir(out);
    }
}

/// The directory of a run to continue.
pub(super) fn existing(out: Option<&Path>) -> Result<PathBuf> {
    match out {
        None => last(),
        Some(out) if out.is_dir() => Ok(out.to_owned()),
        Some(out) => Err(Error::Usage(format!("--out {} is not a directory with a run to continue", out.display()))),
    }
}

/// The last run.
pub(super) fn last() -> Result<PathBuf> {
    match numbers()?.pop() {
        Some((_, path)) => Ok(path),
        None => Err(Error::Usage(format!("there is no run in {PARENT}/; name its directory"))),
    }
}

/// The numbered runs in order.
fn numbers() -> Result<Vec<(u64, PathBuf)>> {
    let parent = Path::new(PARENT);
    if !parent.is_dir() {
        return Ok(Vec::new());
    }
    let mut runs = Vec::new();
    for entry in fs::read_dir(parent).map_err(Error::io(parent))? {
        let path = entry.map_err(Error::io(parent))?.path();
        let number = path.file_name().and_then(|name| name.to_str()?.strip_prefix("run-")?.parse().ok());
        runs.extend(number.map(|n| (n, path)));
    }
    runs.sort();
    Ok(runs)
}
