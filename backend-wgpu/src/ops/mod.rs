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
pub(crate) static ALL: &[&crate::shader::Shader] = &[
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
    &map::elementwise::ADD,
    &map::elementwise::CAST,
    &map::elementwise::COPY_COLUMNS,
    &map::elementwise::FILL,
    &map::loss::CROSS_ENTROPY,
    &map::norm::RMS_NORM,
    &map::norm::RMS_NORM_GRAD,
    &map::norm::RMS_NORM_GRAD_WEIGHT,
    &map::optimizer::ADAMW,
    &map::optimizer::BIAS_UPDATE,
    &map::optimizer::CLIP_SCALE,
    &map::reduce::SUM_ROWS,
    &map::reduce::SUM_SQUARES,
    &map::reduce::TREE_SUM,
    &map::rotary::MLA_KEY_VALUE,
    &map::rotary::MLA_KEY_VALUE_GRAD,
    &map::rotary::MLA_QUERY,
    &map::rotary::ROTARY,
    &map::rows::COMBINE,
    &map::rows::EMBEDDING_GRAD,
    &map::rows::GATHER_ROWS,
    &map::swiglu::SWIGLU,
    &map::swiglu::SWIGLU_GRAD,
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
