//! The ops: one file each beside the shader of the same name, and the table of all shaders.

pub(crate) mod copy;
pub(crate) mod grouped_gemm;
pub(crate) mod mxfp8_dequantize;
#[cfg(test)]
mod shaders_test;

#[cfg(test)]
use crate::shader::Shader;

/// Every shader of the backend.
#[cfg(test)]
pub(crate) const ALL: &[&Shader] = &[&copy::COPY, &grouped_gemm::GROUPED_GEMM, &mxfp8_dequantize::MXFP8_DEQUANTIZE];
