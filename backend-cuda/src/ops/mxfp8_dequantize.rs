//! MXFP8 operands of matrix products as bf16.

use std::sync::Arc;

use dropless_core::{DType, Result, Tensor};

use crate::device::{Gpu, word};
use crate::kernel::{BF16, Binding, Kernel, Launch, PRELUDE, params};

params!(
    /// Extents of the codes.
    Params { rows, columns }
);

/// Threads of a block, blocks of a multiprocessor, and codes of a thread's run.
const THREADS: u32 = 256;
const BLOCKS: usize = 8;
const CODES: usize = 8;

pub(crate) static MXFP8_DEQUANTIZE: Kernel = Kernel {
    name: "mxfp8_dequantize",
    files: &[PRELUDE, include_str!("../../../kernels/mxfp8_dequantize.cu")],
    params: Params::FIELDS,
    tensors: &[
        Binding::read("codes", &[DType::E4m3]),
        Binding::read("scales", &[DType::Ue8m0]),
        Binding::write("out", BF16),
    ],
    maps: 0,
    constants: &["ALONG_ROWS"],
};

/// The values of `codes` in a new bf16 tensor. `along_rows`: blocks run along the rows instead of the columns.
pub(super) fn run(gpu: &Arc<Gpu>, codes: &Tensor, scales: &Tensor, along_rows: bool) -> Result<Tensor> {
    let out = gpu.alloc(DType::Bf16, codes.shape())?;
    gpu.launch(Launch {
        kernel: &MXFP8_DEQUANTIZE,
        tensors: &[Some(codes), Some(scales), Some(&out)],
        constants: &[u32::from(along_rows)],
        params: Params { rows: word(codes.rows()), columns: word(codes.cols()) }.words(),
        maps: &[],
        blocks: codes.len().div_ceil(THREADS as usize * CODES).min(BLOCKS * gpu.multiprocessors as usize) as u64,
        threads: THREADS,
        shared: 0,
    })?;
    Ok(out)
}
