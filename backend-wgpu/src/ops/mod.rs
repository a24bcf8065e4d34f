//! The ops: one file each beside the shader of the same name, and the table of all shaders.

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
pub(crate) static ALL: &[&dropless_core::launch::Program] = &[
    &attention::ROWS.program,
    &attention::SCORES.program,
    &attention::backward::DELTA.program,
    &attention::backward::DIFFERENTIATE.program,
    &attention::backward::KEYS.program,
    &attention::forward::SOFTMAX.program,
    &copy::COPY.program,
    &group_quantize::AMAX.program,
    &group_quantize::COLUMNS.program,
    &group_quantize::OFFSETS.program,
    &group_quantize::ROWS.program,
    &group_quantize::SQUARE_SCALES.program,
    &grouped_gemm::GROUPED_GEMM.program,
    &map::elementwise::ADD.program,
    &map::elementwise::CAST.program,
    &map::elementwise::COPY_COLUMNS.program,
    &map::elementwise::FILL.program,
    &map::loss::CROSS_ENTROPY.program,
    &map::norm::RMS_NORM.program,
    &map::norm::RMS_NORM_GRAD.program,
    &map::norm::RMS_NORM_GRAD_WEIGHT.program,
    &map::optimizer::ADAMW.program,
    &map::optimizer::BIAS_UPDATE.program,
    &map::optimizer::CLIP_SCALE.program,
    &map::reduce::SUM_ROWS.program,
    &map::reduce::SUM_SQUARES.program,
    &map::reduce::TREE_SUM.program,
    &map::rotary::MLA_KEY_VALUE.program,
    &map::rotary::MLA_KEY_VALUE_GRAD.program,
    &map::rotary::MLA_QUERY.program,
    &map::rotary::ROTARY.program,
    &map::rows::COMBINE.program,
    &map::rows::EMBEDDING_GRAD.program,
    &map::rows::GATHER_ROWS.program,
    &map::swiglu::SWIGLU.program,
    &map::swiglu::SWIGLU_GRAD.program,
    &mxfp8_dequantize::MXFP8_DEQUANTIZE.program,
    &route::LAYOUT_COUNT.program,
    &route::LAYOUT_OFFSETS.program,
    &route::LAYOUT_PLACE.program,
    &route::PLAN.program,
    &route::SEQUENCES.program,
    &route::TOP_K.program,
    &route::TOP_K_GRAD.program,
    &route::VALID.program,
];
