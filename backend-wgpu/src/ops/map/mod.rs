//! The row-wise ops: each file launches the shaders of its ops, which work element by element or row by row.

pub(crate) mod elementwise;
pub(crate) mod loss;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod reduce;
pub(crate) mod rotary;
pub(crate) mod rows;
pub(crate) mod swiglu;

use dropless_core::ops::{Checked, Map};
use dropless_core::{Result, Tensor};

use crate::dispatch::{Dispatch, Stream};
use crate::shader::Shader;

/// Every shader of the row-wise ops.
#[cfg(test)]
pub(crate) fn shaders() -> Vec<&'static Shader> {
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
    const SHADERS: &'static [&'static Shader];

    fn queue(&self, stream: &Stream) -> Result<()>;
}

/// Runs a shader with one invocation for each of `count` elements.
fn elements(
    stream: &Stream,
    shader: &'static Shader,
    tensors: &[Option<&Tensor>],
    params: Vec<u32>,
    count: usize,
) -> Result<()> {
    stream.dispatch(Dispatch { shader, tensors, constants: &[], params, workgroups: count.div_ceil(64) as u64 })
}

/// Runs a shader with one workgroup for each of `count` rows.
fn rows(
    stream: &Stream,
    shader: &'static Shader,
    tensors: &[Option<&Tensor>],
    params: Vec<u32>,
    count: usize,
) -> Result<()> {
    stream.dispatch(Dispatch { shader, tensors, constants: &[], params, workgroups: count as u64 })
}
