//! The row-wise ops: each file launches the shaders of its ops, which work element by element or row by row.

pub(crate) mod elementwise;
pub(crate) mod loss;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod reduce;
pub(crate) mod rotary;
pub(crate) mod rows;
pub(crate) mod swiglu;

use dropless_core::launch::Program;
use dropless_core::ops::{Checked, Map};
use dropless_core::{Result, Tensor};

use crate::dispatch::{Dispatch, Stream};
use crate::shader::{Scalars, Shader};

/// Every shader of the row-wise ops.
#[cfg(test)]
pub(crate) fn shaders() -> Vec<&'static Program> {
    let mut all = dropless_core::map_ops!(each Op => <Op<'_> as RowWise>::SHADERS).concat();
    all.sort_by_key(|one| one.name);
    all.dedup_by_key(|one| one.name);
    all
}

pub(crate) fn run(stream: &Stream, op: &Checked<Map<'_>>) -> Result<()> {
    dropless_core::map_ops!(match &**op, op => op.queue(stream))
}

/// A row-wise op on this device.
trait RowWise {
    /// Every shader that it runs.
    #[cfg_attr(not(test), expect(dead_code, reason = "the tests compile them"))]
    const SHADERS: &'static [&'static Program];

    fn queue(&self, stream: &Stream) -> Result<()>;
}

/// Runs a shader with one invocation for each of `count` elements.
fn elements<S: Scalars>(
    stream: &Stream,
    shader: &'static Shader<S>,
    tensors: &[Option<&Tensor>],
    scalars: S,
    count: usize,
) -> Result<()> {
    stream.dispatch(Dispatch::new(shader, scalars, tensors, count.div_ceil(64)))
}

/// Runs a shader with one workgroup for each of `count` rows.
fn workgroups<S: Scalars>(
    stream: &Stream,
    shader: &'static Shader<S>,
    tensors: &[Option<&Tensor>],
    scalars: S,
    count: usize,
) -> Result<()> {
    stream.dispatch(Dispatch::new(shader, scalars, tensors, count))
}
