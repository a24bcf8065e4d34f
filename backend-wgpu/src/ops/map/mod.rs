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
use crate::shader::{Scalars, Shader};

pub(crate) fn run(stream: &Stream, op: &Checked<Map<'_>>) -> Result<()> {
    match &**op {
        Map::Add(op) => elementwise::add(stream, op),
        Map::AdamW(op) => optimizer::adamw(stream, op),
        Map::BiasUpdate(op) => optimizer::bias_update(stream, op),
        Map::Cast(op) => elementwise::cast(stream, op),
        Map::ClipScale(op) => optimizer::clip_scale(stream, op),
        Map::Combine(op) => rows::combine(stream, op),
        Map::CopyColumns(op) => elementwise::copy_columns(stream, op),
        Map::CrossEntropy(op) => loss::cross_entropy(stream, op),
        Map::EmbeddingGrad(op) => rows::embedding_grad(stream, op),
        Map::Fill(op) => elementwise::fill(stream, op),
        Map::GatherRows(op) => rows::gather_rows(stream, op),
        Map::Mla(op) => rotary::mla(stream, op),
        Map::MlaGrad(op) => rotary::mla_grad(stream, op),
        Map::RmsNorm(op) => norm::rms_norm(stream, op),
        Map::RmsNormGrad(op) => norm::rms_norm_grad(stream, op),
        Map::Rotary(op) => rotary::rotary(stream, op),
        Map::SumRows(op) => reduce::sum_rows(stream, op),
        Map::SumSquares(op) => reduce::sum_squares(stream, op),
        Map::Swiglu(op) => swiglu::swiglu(stream, op),
        Map::SwigluGrad(op) => swiglu::swiglu_grad(stream, op),
        Map::TreeSum(op) => reduce::tree_sum(stream, op),
    }
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
