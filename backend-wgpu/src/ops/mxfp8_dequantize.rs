//! MXFP8 operands of matrix products as bf16.

use dropless_core::{DType, Result, Tensor};

use crate::buffer;
use crate::dispatch::{Dispatch, Stream};
use crate::shader::{Binding, FORMATS, PRELUDE, Shader, scalars, word};

scalars!(
    /// Extents; `along_rows`: blocks run along the rows instead of the columns.
    pub(crate) struct DequantizeScalars { elements, columns, along_rows }
);

pub(crate) static MXFP8_DEQUANTIZE: Shader<DequantizeScalars> = Shader::new(
    "mxfp8_dequantize",
    &[PRELUDE, FORMATS, include_str!("../../../shaders/mxfp8_dequantize.wgsl")],
    &[
        Binding::read("codes", &[DType::E4m3]),
        Binding::read("scales", &[DType::Ue8m0]),
        Binding::write("out", &[DType::Bf16]),
    ],
);

/// The values of `codes` in a new bf16 tensor.
pub(crate) fn run(stream: &Stream, codes: &Tensor, scales: &Tensor, along_rows: bool) -> Result<Tensor> {
    let out = buffer::alloc(&stream.gpu, DType::Bf16, codes.shape())?;
    let (elements, columns) = (word(codes.len()), word(codes.cols()));
    let scalars = DequantizeScalars { elements, columns, along_rows: u32::from(along_rows) };
    let tensors = [Some(codes), Some(scales), Some(&out)];
    stream.dispatch(Dispatch::new(&MXFP8_DEQUANTIZE, scalars, &tensors, codes.len().div_ceil(64)))?;
    Ok(out)
}
