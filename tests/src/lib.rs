//! The differential harness: problems that any backend can be given.
#![expect(clippy::unwrap_used, reason = "a harness that cannot go on should stop")]
#![expect(clippy::cast_possible_truncation, reason = "problems are small")]

pub mod conformance;
pub mod differential;
pub mod metered;
pub mod moe;
pub mod mutations;
pub mod ops;
pub mod require;
pub mod specification;
pub mod toy;
