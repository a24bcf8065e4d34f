//! Movement of activations between device and host memory.

use super::arguments::{op, queued};
use super::{Arg, Checked, Values, distinct, number};
use crate::backend::{Backend, Caps};
use crate::error::Result;
use crate::tensor::{Memory, Tensor};

/// Copies `from` to `to`, one of which lives in [`Memory::Host`]. Runs on the offload queue.
///
/// # Shape
/// Any; both alike, and of one element type.
///
/// # Numerics
/// None: bytes are moved.
///
/// # Errors
/// [`crate::Error::Argument`] when they differ, or when both live in the same memory.
#[derive(Clone, Copy, Debug)]
pub struct Offload<'a> {
    /// The source.
    pub from: &'a Tensor,
    /// The destination.
    pub to: &'a Tensor,
}

op!(Offload: read(from), write(to));

const OP: &str = "offload";

queued!(Offload, named OP, by offload);

impl Offload<'_> {
    /// Checks the arguments.
    ///
    /// # Errors
    /// See the type.
    pub fn check(self, _caps: &Caps) -> Result<Checked<Self>> {
        Arg::new(OP, "to", self.to).dtype(&[self.from.dtype()])?.shape(self.from.shape(), "as from")?;
        let kinds = [self.from.memory(), self.to.memory()];
        number(
            OP,
            "to",
            kinds == [Memory::Device, Memory::Host] || kinds == [Memory::Host, Memory::Device],
            "in the other memory than from",
            format_args!("{:?} to {:?}", kinds[0], kinds[1]),
        )?;
        distinct(OP, "to", self.to, &[self.from])?;
        Ok(Checked::new(self))
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (from, mut to) = (Values::read(memory, self.from)?, Values::read(memory, self.to)?);
        to.bytes_mut().copy_from_slice(from.bytes());
        to.write(memory)
    }

    /// Checks and queues.
    ///
    /// # Errors
    /// See the type.
    pub fn run(self, backend: &dyn Backend) -> Result<()> {
        let _span = tracing::trace_span!(OP, from = ?self.from).entered();
        backend.offload(&self.check(backend.caps())?)
    }
}
