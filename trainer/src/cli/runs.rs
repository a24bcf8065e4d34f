//! The directories of runs: `out/run-1`, `out/run-2` and so on, unless `--out` names one.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::train::directory::{check_new, check_resumable};

/// Where runs without `--out` go.
const PARENT: &str = "out";

/// The directory of a run that begins.
pub(super) struct Fresh {
    pub(super) path: PathBuf,
    /// The directories that were made for it, the outermost first.
    made: Vec<PathBuf>,
}

impl Fresh {
    /// Makes the directory of a new run. One that holds a run already is refused, so that nothing is overwritten.
    pub(super) fn new(out: Option<&Path>) -> Result<Fresh> {
        let mut made = Vec::new();
        not_in_a_file(out.unwrap_or(Path::new(PARENT)))?;
        if let Some(out) = out {
            check_new(out)?;
            let fresh = make(out, &mut made).map(|()| out.to_owned());
            return Fresh::or_nothing(fresh, made);
        }
        let parent = Path::new(PARENT);
        let fresh = make(parent, &mut made).and_then(|()| numbered(parent, &mut made));
        Fresh::or_nothing(fresh, made)
    }

    fn or_nothing(path: Result<PathBuf>, made: Vec<PathBuf>) -> Result<Fresh> {
        path.map(|path| Fresh { path, made: made.clone() }).inspect_err(|_| remove(&made))
    }

    /// Removes the directories that were made for a run that failed before it began, as far as nothing is in them.
    pub(super) fn give_up(&self) {
        remove(&self.made);
    }
}

/// Verifies that what is there of a path is directories.
fn not_in_a_file(path: &Path) -> Result<()> {
    match path.ancestors().find(|path| path.exists()) {
        Some(there) if !there.is_dir() => {
            let what = "is no directory, which a run needs: name another one with --out";
            Err(Error::Usage(format!("{} {what}", there.display())))
        }
        _ => Ok(()),
    }
}

/// Makes a directory and those that it is in, as far as they are not there.
fn make(path: &Path, made: &mut Vec<PathBuf>) -> Result<()> {
    match fs::create_dir(path) {
        Ok(()) => made.push(path.to_owned()),
        Err(_) if path.is_dir() => {}
        Err(e) if e.kind() == ErrorKind::NotFound && path.parent().is_some_and(|parent| !parent.is_dir()) => {
            make(path.parent().unwrap_or(path), made)?;
            return make(path, made);
        }
        Err(e) => return Err(Error::io(path)(e)),
    }
    Ok(())
}

/// Makes the next of the numbered directories.
fn numbered(parent: &Path, made: &mut Vec<PathBuf>) -> Result<PathBuf> {
    let mut number = numbers()?.last().map_or(1, |(n, _)| n + 1);
    loop {
        let path = parent.join(format!("run-{number}"));
        match fs::create_dir(&path) {
            Ok(()) => {
                made.push(path.clone());
                return Ok(path);
            }
            // Another run took the number in between.
            Err(e) if e.kind() == ErrorKind::AlreadyExists => number += 1,
            Err(e) => return Err(Error::io(path)(e)),
        }
    }
}

fn remove(made: &[PathBuf]) {
    for path in made.iter().rev() {
        // One with something in it stays.
        let _ = fs::remove_dir(path);
    }
}

/// The directory of a run to continue.
pub(super) fn existing(out: Option<&Path>) -> Result<PathBuf> {
    let path = match out {
        None => last()?,
        Some(out) if out.is_dir() => out.to_owned(),
        Some(out) => {
            return Err(Error::Usage(format!("--out {} is not a directory with a run to continue", out.display())));
        }
    };
    check_resumable(&path)?;
    Ok(path)
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
