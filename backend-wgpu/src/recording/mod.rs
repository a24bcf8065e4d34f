//! Recordings: what the backend queued, in files that anything with WebGPU can run again, with a hash of what every op
//! wrote. docs/recording.md is the format.

mod files;
mod format;
mod hash;
mod recorder;
mod replay;

pub use files::RecordingError;
pub use format::{
    Bound, FileBytes, Header, Load, Loss, Needs, Op, Pipeline, Program, Recording, Section, Span, Step, Tensor, Written,
};
#[cfg(test)]
pub(crate) use hash::SHADER as HASH;
pub(crate) use recorder::Dispatched;
pub use recorder::Recorder;
pub use replay::{Difference, Element, Place, Replay};
