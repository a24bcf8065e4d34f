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
pub(crate) mod split;

#[cfg(test)]
use dropless_core::launch::Program;

/// Every shader of the backend.
#[cfg(test)]
pub(crate) fn all() -> Vec<&'static Program> {
    let others: &[&Program] = &[
        &attention::ROWS.program,
        &attention::SCORES.program,
        &attention::backward::DELTA.program,
        &attention::backward::DIFFERENTIATE.program,
        &attention::backward::KEYS.program,
        &attention::forward::SOFTMAX.program,
        &copy::COPY.program,
        &group_quantize::AMAX.program,
        &group_quantize::COLUMNS.program,
        &group_quantize::PADDED_OFFSETS.program,
        &group_quantize::ROWS.program,
        &group_quantize::SQUARE_SCALES.program,
        &grouped_gemm::GROUPED_GEMM.program,
        &mxfp8_dequantize::MXFP8_DEQUANTIZE.program,
        &split::SPLIT.program,
        &route::LAYOUT_COUNT.program,
        &route::LAYOUT_OFFSETS.program,
        &route::LAYOUT_PLACE.program,
        &route::PLAN.program,
        &route::SEQUENCES.program,
        &route::TOP_K.program,
        &route::TOP_K_GRAD.program,
        &route::VALID.program,
    ];
    [&map::shaders()[..], others].concat()
}
