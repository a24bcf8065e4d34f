//! The ops: one file each, with the arguments, their checks, and the specification in plain Rust.
//!
//! An op is a struct of tensors and numbers. `op.run(backend)` checks it once and queues it; a backend only ever sees
//! a [`Checked`] op. An output never shares a buffer with another operand, unless the op says that it works in place.

mod all_to_all;
mod arguments;
mod attention;
mod group_quantize;
mod grouped_gemm;
mod map;
mod offload;
pub(crate) mod offsets;
mod route;
mod values;

pub use all_to_all::{AllToAll, Counts};
pub use arguments::{Access, FieldName, Op, Use, View};
pub use attention::{Attention, AttentionBackward, AttentionForward, AttentionShape, KEY_TILE};
pub(crate) use attention::{OnlineSoftmax, differentiate, visible};
pub use group_quantize::{BlockFormat, ColumnBlocks, GroupQuantize, RowBlocks};
pub use grouped_gemm::{GemmKind, GroupedGemm, Operand, Product, Ragged, SPLIT_BLOCK, Side, Split};
pub use map::*;
pub use offload::Offload;
pub use route::{Balance, Layout, NONE, Plan, Route, Score, TopK, TopKGrad, Window};

use values::Values;

use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Tensor};

/// The [name](Op::name) of every op.
pub fn names() -> impl Iterator<Item = &'static str> {
    let families = [
        GroupedGemm::NAMES,
        GroupQuantize::NAMES,
        AllToAll::NAMES,
        Offload::NAMES,
        Attention::NAMES,
        Route::NAMES,
        Map::NAMES,
    ];
    families.into_iter().flatten().copied()
}

/// An op whose arguments have been checked against each other and against a backend's [`crate::Caps`].
#[derive(Debug)]
pub struct Checked<T>(T);

impl<T> Checked<T> {
    /// Only the ops' own `check` may call this.
    fn new(op: T) -> Self {
        Checked(op)
    }
}

impl<T> std::ops::Deref for Checked<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// A tensor argument under check: the op, the field's name and the tensor.
struct Arg<'a> {
    op: &'static str,
    field: &'static str,
    tensor: &'a Tensor,
}

impl<'a> Arg<'a> {
    fn new(op: &'static str, field: &'static str, tensor: &'a Tensor) -> Self {
        Arg { op, field, tensor }
    }

    /// Exactly this shape; `meaning` names the dimensions, e.g. `[groups, n, k]`.
    fn shape(self, shape: &[usize], meaning: &str) -> Result<Self> {
        let t = self.tensor;
        ensure(t.shape() == shape, self.op, self.field, || format!("{shape:?} ({meaning})"), || format!("{t:?}"))?;
        Ok(self)
    }

    /// This many elements, whatever the shape.
    fn len(self, len: usize, meaning: &str) -> Result<Self> {
        let t = self.tensor;
        ensure(t.len() == len, self.op, self.field, || format!("{len} elements ({meaning})"), || format!("{t:?}"))?;
        Ok(self)
    }

    /// One of these element types.
    fn dtype(self, any: &[DType]) -> Result<Self> {
        let t = self.tensor;
        ensure(any.contains(&t.dtype()), self.op, self.field, || format!("one of {any:?}"), || format!("{t:?}"))?;
        Ok(self)
    }
}

/// A number under check.
fn number(
    op: &'static str,
    field: &'static str,
    ok: bool,
    expected: &str,
    found: impl std::fmt::Display,
) -> Result<()> {
    ensure(ok, op, field, || expected.to_owned(), || found.to_string())
}

/// Fails when an output shares its buffer with another operand.
fn distinct(op: &'static str, field: &'static str, out: &Tensor, others: &[&Tensor]) -> Result<()> {
    for other in others {
        if out.shares_storage(other) {
            return Err(Error::Argument {
                op,
                field,
                expected: "a buffer of its own".into(),
                found: format!("{out:?} in the buffer of {other:?}"),
            });
        }
    }
    Ok(())
}

/// The float types an op reads and writes where nothing else is said.
const FLOAT: &[DType] = &[DType::F32, DType::Bf16];
