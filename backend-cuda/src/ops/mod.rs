//! The ops: one file each beside the kernel of the same name, and the table of all kernels.

#[cfg(test)]
mod kernels_test;
pub(crate) mod map;

#[cfg(test)]
pub(crate) use kernels_test::for_each_architecture;

/// Every kernel of the backend, with constants to compile it under.
#[cfg(test)]
pub(crate) static ALL: &[(&crate::kernel::Kernel, &[&[u32]])] = &[
    (&map::elementwise::ADD, &[&[]]),
    (&map::optimizer::ADAMW, &[&[]]),
    (&map::optimizer::BIAS_UPDATE, &[&[]]),
    (&map::elementwise::CAST, &[&[]]),
    (&map::optimizer::CLIP_SCALE, &[&[]]),
    (&map::rows::COMBINE, &[&[]]),
    (&map::elementwise::COPY_COLUMNS, &[&[]]),
    (&map::loss::CROSS_ENTROPY, &[&[]]),
    (&map::rows::EMBEDDING_GRAD, &[&[]]),
    (&map::elementwise::FILL, &[&[]]),
    (&map::rows::GATHER_ROWS, &[&[]]),
    (&map::rotary::MLA_KEY_VALUE, &[&[]]),
    (&map::rotary::MLA_KEY_VALUE_GRAD, &[&[]]),
    (&map::rotary::MLA_QUERY, &[&[]]),
    (&map::norm::RMS_NORM, &[&[]]),
    (&map::norm::RMS_NORM_GRAD, &[&[]]),
    (&map::norm::RMS_NORM_GRAD_WEIGHT, &[&[]]),
    (&map::rotary::ROTARY, &[&[]]),
    (&map::reduce::SUM_BLOCKS, &[&[]]),
    (&map::reduce::SUM_ROWS, &[&[]]),
    (&map::reduce::SUM_SQUARES, &[&[]]),
    (&map::swiglu::SWIGLU, &[&[]]),
    (&map::swiglu::SWIGLU_GRAD, &[&[]]),
    (&map::reduce::TREE_SUM, &[&[]]),
];
