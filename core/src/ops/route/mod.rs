//! From router logits to a sorted ragged layout, all on the device. NUMERICS.md, "Routing".
//!
//! [`TopK`] chooses experts, [`Plan`] lists the tokens that each rank must receive (a token once per rank, however many
//! of its experts live there), [`Layout`] sorts what a rank received by expert. [`TopKGrad`] is the way back.

mod balance;
mod layout;
mod plan;
mod top_k;

pub use balance::Balance;
pub use layout::Layout;
pub use plan::{Plan, Window};
pub use top_k::{Score, TopK, TopKGrad};

use super::{Arg, Checked, DType, Values, arguments, distinct, number};
use crate::backend::{Backend, Caps};
use crate::error::Result;
use crate::tensor::Tensor;
use arguments::{family, op, tensors};

/// In an index: no row, no slot, no expert.
pub const NONE: u32 = u32::MAX;

/// A step of routing.
#[derive(Clone, Copy, Debug)]
pub enum Route<'a> {
    /// See [`TopK`].
    TopK(TopK<'a>),
    /// See [`TopKGrad`].
    TopKGrad(TopKGrad<'a>),
    /// See [`Plan`].
    Plan(Plan<'a>),
    /// See [`Layout`].
    Layout(Layout<'a>),
}

const OP: &str = "route";

family!(
    Route { TopK named "top_k", TopKGrad named "top_k_grad", Plan named "plan", Layout named "layout" },
    by route
);

impl Route<'_> {
    /// Checks the arguments.
    ///
    /// # Errors
    /// See the variants.
    pub fn check(self, caps: &Caps) -> Result<Checked<Self>> {
        match &self {
            Route::TopK(op) => op.check()?,
            Route::TopKGrad(op) => op.check()?,
            Route::Plan(op) => op.check(caps)?,
            Route::Layout(op) => op.check()?,
        }
        Ok(Checked::new(self))
    }

    /// Checks and queues.
    ///
    /// # Errors
    /// See the variants; a failure of the device.
    pub fn run(self, backend: &dyn Backend) -> Result<()> {
        let _span = tracing::trace_span!(OP).entered();
        backend.route(&self.check(backend.caps())?)
    }
}

/// A row or slot as it is stored; the checks keep every one of them below [`NONE`].
#[expect(clippy::cast_possible_truncation, reason = "bounded by `check`")]
const fn index(i: usize) -> u32 {
    i as u32
}

/// Fails when the entries of a tensor cannot all be named by a u32.
fn indexable(field: &'static str, tensor: &Tensor) -> Result<()> {
    number(OP, field, tensor.len() < NONE as usize, "fewer than 2^32 - 1 elements", tensor.len())
}
