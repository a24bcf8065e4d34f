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
mod split;

#[cfg(test)]
pub(crate) use kernels_test::for_each_architecture;

#[cfg(test)]
use dropless_core::launch::Program;

/// Every kernel of the backend, with constants to compile it under.
#[cfg(test)]
pub(crate) fn all() -> Vec<(&'static Program, &'static [&'static [u32]])> {
    let others: &[(&Program, &[&[u32]])] = &[
        (&all_to_all::ANNOUNCE.program, &[crate::comm::VALUES]),
        (&all_to_all::POST.program, &[crate::comm::VALUES]),
        (&all_to_all::PULL.program, &[crate::comm::VALUES]),
        (&all_to_all::UNPACK.program, &[crate::comm::VALUES]),
        (&attention::DELTA.program, &[&[4]]),
        (&attention::FIRST.program, &[&[4, 64]]),
        (&attention::chains::FORWARD.program, &[&[4, 64, 128]]),
        (&attention::chains::GRAD_KEYS.program, &[&[4, 64, 128]]),
        (&attention::chains::GRAD_QUERIES.program, &[&[4, 64, 128]]),
        (
            &attention::tensor_core::FORWARD.program,
            &[
                &[64, 128, 2, 4096, 192, 128, 2, 1],
                &[64, 128, 3, 4096, 128, 128, 2, 1],
                &[64, 128, 3, 4096, 32, 16, 4, 1],
                &[64, 128, 2, 4096, 128, 128, 2, 0],
                &[64, 128, 2, 4096, 32, 16, 4, 0],
            ],
        ),
        (
            &attention::tensor_core::GRAD_KEYS.program,
            &[
                &[64, 128, 2, 4096, 192, 128, 3, 1, 1, 1],
                &[64, 128, 2, 4096, 256, 256, 1, 1, 1, 0],
                &[64, 128, 2, 4096, 256, 256, 1, 1, 0, 1],
                &[64, 128, 2, 4096, 32, 16, 4, 0, 1, 1],
            ],
        ),
        (
            &attention::tensor_core::GRAD_QUERIES.program,
            &[
                &[64, 128, 2, 4096, 192, 128, 3, 1, 64],
                &[64, 128, 2, 4096, 256, 256, 2, 1, 32],
                &[64, 128, 2, 4096, 32, 16, 4, 0, 64],
            ],
        ),
        (
            &attention::tensor_core::GRAD_QUERIES_STORED.program,
            &[
                &[64, 128, 2, 4096, 192, 128, 3, 1, 2],
                &[64, 128, 2, 4096, 256, 256, 3, 1, 1],
                &[64, 128, 2, 4096, 32, 16, 4, 0, 2],
            ],
        ),
        (
            &group_quantize::QUANTIZE.program,
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
        (&group_quantize::AMAX.program, &[&[]]),
        (&group_quantize::OFFSETS.program, &[&[]]),
        (
            &grouped_gemm::F32_GROUPED_GEMM.program,
            &[
                &[0, 0, 1, 1, 0, 0, 64],
                &[0, 1, 1, 0, 0, 0, 32],
                &[1, 0, 0, 0, 0, 0, 32],
                &[1, 1, 1, 1, 0, 0, 64],
                &[0, 0, 1, 1, 0, 1, 64],
                &[0, 0, 1, 0, 1, 1, 32],
                &[1, 1, 0, 0, 1, 0, 64],
            ],
        ),
        (&grouped_gemm::SM90_BF16_GROUPED_GEMM.program, grouped_gemm::BF16_CONSTANTS),
        (&grouped_gemm::SM90_E4M3_GROUPED_GEMM.program, grouped_gemm::E4M3_CONSTANTS),
        (&mxfp8_dequantize::MXFP8_DEQUANTIZE.program, &[&[0], &[1]]),
        (&split::SPLIT.program, &[&[]]),
        (&route::TOP_K.program, &[&[256, 8, 0], &[17, 1, 1], &[512, 1, 1]]),
        (&route::BALANCE_BLOCKS.program, &[&[256], &[5]]),
        (&route::BALANCE_LOSS.program, &[&[256]]),
        (&route::VALID_TOKENS.program, &[&[]]),
        (&route::TOP_K_GRAD.program, &[&[256, 0], &[17, 1]]),
        (&route::PLAN_COUNT.program, &[&[]]),
        (&route::PLAN_PLACE.program, &[&[]]),
        (&route::TABLE_SCAN.program, &[&[]]),
        (&route::LAYOUT_COUNT.program, &[&[]]),
        (&route::LAYOUT_OFFSETS.program, &[&[]]),
        (&route::LAYOUT_PLACE.program, &[&[]]),
    ];
    const WITHOUT: &[&[u32]] = &[&[]];
    let of_map = map::kernels().into_iter().map(|program| (program, WITHOUT));
    of_map.chain(others.iter().copied()).collect()
}
