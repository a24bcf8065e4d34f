//! f32 operands of matrix products as three planes of bf16.

use dropless_core::{DType, Result, Tensor};

use crate::buffer;
use crate::dispatch::{Dispatch, Stream};
use crate::shader::{Binding, FORMATS, PRELUDE, Shader, scalars, word};

scalars!(
    /// How many values.
    pub(crate) struct SplitScalars { elements }
);

pub(crate) static SPLIT: Shader<SplitScalars> = Shader::new(
    "split",
    &[PRELUDE, FORMATS, include_str!("../../../shaders/split.wgsl")],
    &[Binding::read("x", &[DType::F32]), Binding::write("out", &[DType::Bf16])],
);

/// Low, middle, high.
const PLANES: usize = 3;

/// The planes of `x` in a new tensor `[3, ...x]`.
pub(crate) fn run(stream: &Stream, x: &Tensor) -> Result<Tensor> {
    let out = buffer::alloc(&stream.gpu, DType::Bf16, &[&[PLANES], x.shape()].concat())?;
    let scalars = SplitScalars { elements: word(x.len()) };
    stream.dispatch(Dispatch::new(&SPLIT, scalars, &[Some(x), Some(&out)], x.len().div_ceil(64)))?;
    Ok(out)
}
