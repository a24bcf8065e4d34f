//! What can go wrong outside the ops: configurations and files.

use std::path::{Path, PathBuf};

use dropless_core::escape::escaped;
use dropless_core::files::FileError;

/// A failure around a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration that is not one, or whose values do not fit together.
    #[error("config: {}", escaped(.0))]
    Config(String),
    /// A file of a checkpoint or model that is damaged or does not fit.
    #[error("{}: {}", name(path), escaped(what))]
    Checkpoint {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file that cannot be read or written.
    #[error("{}: {source}", name(path))]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A failure of the library.
    #[error(transparent)]
    Core(#[from] dropless_core::Error),
}

impl From<FileError> for Error {
    fn from(error: FileError) -> Error {
        match error {
            FileError::Io { path, source } => Error::Io { path, source },
            FileError::Unfit { path, what } => Error::Checkpoint { path, what },
        }
    }
}

fn name(path: &Path) -> String {
    escaped(&path.display().to_string()).to_string()
}

/// A result with this crate's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// For `map_err` on file operations.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { path, source }
    }

    /// A damaged or unfit file.
    pub fn checkpoint(path: impl Into<PathBuf>, what: impl Into<String>) -> Error {
        Error::Checkpoint { path: path.into(), what: what.into() }
    }
}
