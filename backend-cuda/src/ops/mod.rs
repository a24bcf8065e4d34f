//! The ops: one file each beside the kernel of the same name, and the table of all kernels. A row-wise op names its kernels itself.

pub(crate) mod all_to_all;
pub(crate) mod attention;
pub(crate) mod group_quantize;
pub(crate) mod grouped_gemm;
#[cfg(test)]
mod kernels_test;
pub(crate) mod map;
mod mxfp8_dequantize;
pub(crate) mod route;

#[cfg(test)]
pub(crate) use kernels_test::for_each_architecture;

/// Every kernel of the backend, with constants to compile it under.
#[cfg(test)]
pub(crate) fn all() -> Vec<(&'static crate::kernel::Kernel, &'static [&'static [u32]])> {
    let others: &[(&crate::kernel::Kernel, &[&[u32]])] = &[
        (&all_to_all::ANNOUNCE, &[crate::comm::VALUES]),
        (&all_to_all::POST, &[crate::comm::VALUES]),
        (&all_to_all::PULL, &[crate::comm::VALUES]),
        (&all_to_all::UNPACK, &[crate::comm::VALUES]),
        (&attention::DELTA, &[&[4]]),
        (&attention::FIRST, &[&[4, 64]]),
        (&attention::chains::FORWARD, &[&[4, 64, 128]]),
        (&attention::chains::GRAD_KEYS, &[&[4, 64, 128]]),
        (&attention::chains::GRAD_QUERIES, &[&[4, 64, 128]]),
        (
            &attention::tensor_core::FORWARD,
            &[
                &[64, 128, 2, 4096, 192, 128, 2, 1],
                &[64, 128, 2, 4096, 32, 16, 4, 1],
                &[64, 128, 2, 4096, 32, 16, 4, 0],
            ],
        ),
        (
            &attention::tensor_core::GRAD_KEYS,
            &[
                &[64, 128, 2, 4096, 192, 128, 3, 1, 1, 1],
                &[64, 128, 2, 4096, 256, 256, 1, 1, 1, 0],
                &[64, 128, 2, 4096, 256, 256, 1, 1, 0, 1],
                &[64, 128, 2, 4096, 32, 16, 4, 0, 1, 1],
            ],
        ),
        (
            &attention::tensor_core::GRAD_QUERIES,
            &[
                &[64, 128, 2, 4096, 192, 128, 3, 1, 64],
                &[64, 128, 2, 4096, 256, 256, 2, 1, 32],
                &[64, 128, 2, 4096, 32, 16, 4, 0, 64],
            ],
        ),
        (
            &group_quantize::QUANTIZE,
            &[
                &[0, 0, 32, 0],
                &[0, 1, 32, 1],
                &[1, 0, 32, 0],
                &[1, 1, 128, 0],
                &[1, 0, 128, 1],
                &[2, 0, 32, 0],
                &[2, 1, 16, 1],
            ],
        ),
        (&group_quantize::AMAX, &[&[]]),
        (&group_quantize::OFFSETS, &[&[]]),
        (
            &grouped_gemm::F32_GROUPED_GEMM,
            &[&[0, 0, 1, 1, 64], &[0, 1, 1, 0, 32], &[1, 0, 0, 0, 32], &[1, 1, 1, 1, 64]],
        ),
        (&grouped_gemm::SM90_BF16_GROUPED_GEMM, grouped_gemm::BF16_CONSTANTS),
        (&grouped_gemm::SM90_E4M3_GROUPED_GEMM, grouped_gemm::E4M3_CONSTANTS),
        (&mxfp8_dequantize::MXFP8_DEQUANTIZE, &[&[0], &[1]]),
        (&route::TOP_K, &[&[256, 8, 0], &[17, 1, 1], &[512, 1, 1]]),
        (&route::BALANCE_BLOCKS, &[&[256], &[5]]),
        (&route::BALANCE_LOSS, &[&[256]]),
        (&route::VALID_TOKENS, &[&[]]),
        (&route::TOP_K_GRAD, &[&[256, 0], &[17, 1]]),
        (&route::PLAN_COUNT, &[&[]]),
        (&route::PLAN_PLACE, &[&[]]),
        (&route::TABLE_SCAN, &[&[]]),
        (&route::LAYOUT_COUNT, &[&[]]),
        (&route::LAYOUT_OFFSETS, &[&[]]),
        (&route::LAYOUT_PLACE, &[&[]]),
    ];
    const WITHOUT: &[&[u32]] = &[&[]];
    let of_map = map::kernels().into_iter().map(|kernel| (kernel, WITHOUT));
    of_map.chain(others.iter().copied()).collect()
}
