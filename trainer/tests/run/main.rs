//! The directory of a run: who may begin or go on there, what may lie there, and that a run which is broken off at any
//! point, by a signal or by the disk, ends with the bits of one that is not; and the trace of a step.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![cfg(unix)]

#[cfg(target_os = "linux")]
mod broken_off;
mod directory;
mod special;
mod tiny;
mod trace;
