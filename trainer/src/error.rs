//! What can go wrong in the program: one line each, with what is needed to mend it. Names and values of others appear
//! without control characters.

#[cfg(feature = "wgpu")]
use crate::backends::recording::RecordingError;
use std::path::{Path, PathBuf};

use dropless_core::escape::escaped;
use dropless_core::files::FileError;

/// A failure of the program. All of them end it with exit code 2; see [`crate::cli`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A command line that cannot be carried out.
    #[error("{}", escaped(.0))]
    Usage(String),
    /// A configuration that is not one, or whose values do not fit together.
    #[error("config: {}", escaped(.0))]
    Config(String),
    /// Text that cannot be trained on.
    #[error("data: {}", escaped(.0))]
    Data(String),
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
    /// A number that is not finite; the run stops before it spreads.
    #[error("step {step}: {} is not finite (last good checkpoint: {})", escaped(tensor), escaped(checkpoint))]
    NonFinite {
        /// The step.
        step: u64,
        /// The first tensor that is not finite.
        tensor: String,
        /// Where to continue from.
        checkpoint: String,
    },
    /// A run that device or host cannot hold.
    #[error(
        "memory: {what} needs {}{}, {} may be used ({limit}); a smaller batch or model, more moe.chunks, or [activations] \
         to recompute",
        if *at_least { "at least " } else { "" }, gib(*needs), gib(*may_use)
    )]
    Memory {
        /// The device or the host.
        what: &'static str,
        /// Bytes needed.
        needs: u64,
        /// Bytes that may be used.
        may_use: u64,
        /// What says so.
        limit: &'static str,
        /// Whether only the least was counted.
        at_least: bool,
    },
    /// The system gives the program no more threads.
    #[error("no thread for {what}: {source} (see ulimit -u, ulimit -v, and pids.max of the control group)")]
    Thread {
        /// What it is needed for.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A failure of the library in a step of training, or right after it.
    #[error("step {step}: {source}")]
    Step {
        /// The step.
        step: u64,
        /// The failure.
        source: dropless_core::Error,
    },
    /// A failure of the library.
    #[error(transparent)]
    Core(#[from] dropless_core::Error),
}

impl From<dropless_model::Error> for Error {
    fn from(error: dropless_model::Error) -> Error {
        use dropless_model::Error as E;
        match error {
            E::Config(what) => Error::Config(what),
            E::Checkpoint { path, what } => Error::Checkpoint { path, what },
            E::Io { path, source } => Error::Io { path, source },
            E::Core(error) => Error::Core(error),
            other => Error::Usage(other.to_string()),
        }
    }
}

#[cfg(feature = "wgpu")]
impl From<RecordingError> for Error {
    fn from(error: RecordingError) -> Error {
        use RecordingError as E;
        match error {
            E::Io { path, source } => Error::Io { path, source },
            E::Unfit { path, what } => Error::Checkpoint { path, what },
            E::Core(error) => Error::Core(error),
            other => Error::Usage(other.to_string()),
        }
    }
}

impl From<FileError> for Error {
    fn from(error: FileError) -> Error {
        dropless_model::Error::from(error).into()
    }
}

fn name(path: &Path) -> String {
    escaped(&path.display().to_string()).to_string()
}

/// So many bytes.
fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

/// A result with the program's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// For `map_err` on file operations.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { path, source }
    }

    /// For `map_err`: there is no thread for this.
    pub(crate) fn thread(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let what = what.into();
        move |source| Error::Thread { what, source }
    }

    /// For `map_err`: a failure of the library happened in this step.
    pub(crate) fn in_step(step: u64) -> impl FnOnce(Error) -> Error {
        move |error| match error {
            Error::Core(source) => Error::Step { step, source },
            other => other,
        }
    }

    /// What the library reports, whenever it was.
    pub(crate) fn core(&self) -> Option<&dropless_core::Error> {
        match self {
            Error::Core(source) | Error::Step { source, .. } => Some(source),
            _ => None,
        }
    }

    /// A damaged or unfit file.
    pub(crate) fn checkpoint(path: impl Into<PathBuf>, what: impl Into<String>) -> Error {
        Error::Checkpoint { path: path.into(), what: what.into() }
    }
}
