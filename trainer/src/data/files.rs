//! Which files the globs of a configuration mean.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use glob::MatchOptions;

use crate::config::Format;
use crate::error::{Error, Result};

/// The files that the patterns match, in the order of their names. A file that several names lead to (relative, absolute,
/// through a link) is there once, and wildcards match no hidden file or folder.
///
/// # Errors
/// [`Error::Data`] for a bad pattern and one that matches nothing, [`Error::Io`].
pub fn matching(patterns: &[String]) -> Result<Vec<PathBuf>> {
    let options = MatchOptions { require_literal_leading_dot: true, ..MatchOptions::new() };
    let mut files = Vec::new();
    for pattern in patterns {
        let paths = glob::glob_with(pattern, options).map_err(|e| Error::Data(format!("pattern {pattern:?}: {e}")))?;
        let (before, mut other) = (files.len(), None);
        for path in paths {
            let path = path.map_err(|e| Error::Data(e.to_string()))?;
            match path.is_file() {
                true => files.push(path),
                false => {
                    other.get_or_insert(path);
                }
            }
        }
        if files.len() == before {
            let only = other.map_or(String::new(), |path| match path.is_dir() {
                true => format!(", but the directory {}", path.display()),
                false => format!(", but {}, which is a pipe, a socket or a device", path.display()),
            });
            return Err(Error::Data(format!("pattern {pattern:?} matches no file{only}")));
        }
    }
    once(files)
}

/// These files in the order of their names, each once.
///
/// # Errors
/// [`Error::Io`] for one that is not there.
pub fn once(mut files: Vec<PathBuf>) -> Result<Vec<PathBuf>> {
    files.sort();
    let mut seen = BTreeSet::new();
    let mut kept = Vec::with_capacity(files.len());
    for path in files {
        if seen.insert(fs::canonicalize(&path).map_err(Error::io(&path))?) {
            kept.push(path);
        }
    }
    Ok(kept)
}

/// What a file is by its name.
pub(crate) fn format(path: &Path) -> Format {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("jsonl" | "ndjson") => Format::Jsonl,
        Some("bin" | "idx") => Format::Indexed,
        _ => Format::Text,
    }
}
