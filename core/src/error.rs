//! The one error type of the library. Every message says what is needed to fix the cause.

use crate::lockstep::Divergence;

/// What can go wrong, with the values that were found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument of an op does not fit the others.
    #[error("{op}: {field} is {found}, expected {expected}")]
    Argument {
        /// The op, e.g. `grouped_gemm`.
        op: &'static str,
        /// The argument's name.
        field: &'static str,
        /// What was expected, with its meaning where the number alone does not show it.
        expected: String,
        /// What was found.
        found: String,
    },
    /// There is not enough memory, detected before anything was computed or sent.
    #[error("{op}: needs {needed} bytes, but only {available} are available ({hint})")]
    Capacity {
        /// The op or buffer that needs the memory.
        op: &'static str,
        /// Bytes needed.
        needed: u64,
        /// Bytes available.
        available: u64,
        /// How to make it fit.
        hint: String,
    },
    /// A tensor of one backend was passed to another.
    #[error("{op}: the tensor belongs to another backend than {backend}")]
    ForeignTensor {
        /// The op.
        op: &'static str,
        /// The backend that was called.
        backend: &'static str,
    },
    /// The ranks of a collective disagree, or one of them failed, exited, stopped responding or never joined.
    #[error("rank {rank}: {op}: {what}")]
    Collective {
        /// The rank that reports.
        rank: usize,
        /// The collective.
        op: &'static str,
        /// What happened, with the ranks and values involved.
        what: String,
    },
    /// The backend is not available here.
    #[error("{backend}: {why}")]
    Unavailable {
        /// The backend.
        backend: &'static str,
        /// Why, and what to do about it.
        why: String,
    },
    /// A backend without this op was asked for it.
    #[error("{backend} has no {op}")]
    Unsupported {
        /// The backend.
        backend: &'static str,
        /// The op.
        op: &'static str,
    },
    /// Two backends in lockstep computed different bits.
    #[error("{0}")]
    Divergence(Box<Divergence>),
    /// A device reported a failure.
    #[error("{backend}: {op}: {what}")]
    Device {
        /// The backend.
        backend: &'static str,
        /// The op that queued the work.
        op: &'static str,
        /// The device's own message.
        what: String,
    },
}

/// A result with the library's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// `Err(Error::Argument)` unless `ok`; the strings are built only on failure.
///
/// # Errors
/// [`Error::Argument`] unless `ok`.
pub fn ensure(
    ok: bool,
    op: &'static str,
    field: &'static str,
    expected: impl FnOnce() -> String,
    found: impl FnOnce() -> String,
) -> Result<()> {
    if ok { Ok(()) } else { Err(Error::Argument { op, field, expected: expected(), found: found() }) }
}
