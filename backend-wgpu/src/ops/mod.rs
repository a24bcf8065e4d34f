//! The ops: one file each beside the shader of the same name, and the table of all shaders. A row-wise op names its shaders itself.

pub(crate) mod attention;
pub(crate) mod chains;
pub(crate) mod copy;
pub(crate) mod group_quantize;
pub(crate) mod grouped_gemm;
pub(crate) mod map;
pub(crate) mod mxfp8_dequantize;
pub(crate) mod route;
#[cfg(test)]
mod shaders_test;

/// Every shader of the backend.
#[cfg(test)]
pub(crate) fn all() -> Vec<&'static crate::shader::Shader> {
    let others: [&crate::shader::Shader; 22] = [
        &attention::ROWS,
        &attention::SCORES,
        &attention::backward::DELTA,
        &attention::backward::DIFFERENTIATE,
        &attention::backward::KEYS,
        &attention::forward::SOFTMAX,
        &copy::COPY,
        &group_quantize::AMAX,
        &group_quantize::COLUMNS,
        &group_quantize::OFFSETS,
        &group_quantize::ROWS,
        &group_quantize::SQUARE_SCALES,
        &grouped_gemm::GROUPED_GEMM,
        &mxfp8_dequantize::MXFP8_DEQUANTIZE,
        &route::LAYOUT_COUNT,
        &route::LAYOUT_OFFSETS,
        &route::LAYOUT_PLACE,
        &route::PLAN,
        &route::SEQUENCES,
        &route::TOP_K,
        &route::TOP_K_GRAD,
        &route::VALID,
    ];
    [&map::shaders()[..], &others].concat()
}
