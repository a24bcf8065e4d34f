//! MXFP8 operands of matrix products as bf16.

use std::sync::Arc;

use dropless_core::{DType, Result, Tensor};

use crate::device::Gpu;
use crate::kernel::{BF16, Binding, Kernel, Launch, PRELUDE, scalars, word};

scalars!(
    /// Extents of the codes.
    pub(crate) struct DequantizeScalars { rows, columns }
);

/// Threads of a block, blocks of a multiprocessor, and codes of a thread's run.
const THREADS: u32 = 256;
const BLOCKS: usize = 8;
const CODES: usize = 8;

pub(crate) static MXFP8_DEQUANTIZE: Kernel<DequantizeScalars> = Kernel::new(
    "mxfp8_dequantize",
    &[PRELUDE, include_str!("../../../kernels/mxfp8_dequantize.cu")],
    &[Binding::read("codes", &[DType::E4m3]), Binding::read("scales", &[DType::Ue8m0]), Binding::write("out", BF16)],
)
.constants(&["ALONG_ROWS"]);

/// The values of `codes` in a new bf16 tensor. `along_rows`: blocks run along the rows instead of the columns.
pub(super) fn run(gpu: &Arc<Gpu>, codes: &Tensor, scales: &Tensor, along_rows: bool) -> Result<Tensor> {
    let out = gpu.alloc(DType::Bf16, codes.shape())?;
    let scalars = DequantizeScalars { rows: word(codes.rows()), columns: word(codes.cols()) };
    let tensors = [Some(codes), Some(scales), Some(&out)];
    let blocks = codes.len().div_ceil(THREADS as usize * CODES).min(BLOCKS * gpu.multiprocessors as usize);
    let constants = &[u32::from(along_rows)];
    gpu.launch(Launch { constants, ..Launch::new(&MXFP8_DEQUANTIZE, scalars, &tensors, blocks, THREADS) })?;
    Ok(out)
}
