//! MXFP8 operands of matrix products as bf16.

use dropless_core::{DType, Result, Tensor};

use crate::buffer;
use crate::dispatch::{Dispatch, Stream, word};
use crate::shader::{Binding, FORMATS, PRELUDE, Shader, params};

params!(
    /// Extents; `along_rows`: blocks run along the rows instead of the columns.
    Params { elements, columns, along_rows }
);

pub(crate) static MXFP8_DEQUANTIZE: Shader = Shader {
    name: "mxfp8_dequantize",
    files: &[PRELUDE, FORMATS, include_str!("../../../shaders/mxfp8_dequantize.wgsl")],
    params: Params::FIELDS,
    bindings: &[
        Binding::read("codes", &[DType::E4m3]),
        Binding::read("scales", &[DType::Ue8m0]),
        Binding::write("out", &[DType::Bf16]),
    ],
    constants: &[],
};

/// The values of `codes` in a new bf16 tensor.
pub(crate) fn run(stream: &Stream, codes: &Tensor, scales: &Tensor, along_rows: bool) -> Result<Tensor> {
    let out = buffer::alloc(&stream.gpu, DType::Bf16, codes.shape())?;
    let (elements, columns) = (word(codes.len()), word(codes.cols()));
    stream.dispatch(Dispatch {
        shader: &MXFP8_DEQUANTIZE,
        tensors: &[Some(codes), Some(scales), Some(&out)],
        constants: &[],
        params: Params { elements, columns, along_rows: u32::from(along_rows) }.words(),
        workgroups: codes.len().div_ceil(64) as u64,
    })?;
    Ok(out)
}
