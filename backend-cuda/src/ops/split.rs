//! f32 operands of matrix products as three planes of bf16.

use std::sync::Arc;

use dropless_core::{DType, Result, Tensor};

use crate::device::Gpu;
use crate::kernel::{BF16, Binding, F32, Kernel, Launch, PRELUDE, scalars, word};

scalars!(
    /// How many values.
    pub(crate) struct SplitScalars { count }
);

/// Threads of a block, and blocks of a multiprocessor.
const THREADS: u32 = 256;
const BLOCKS: usize = 8;
/// Low, middle, high.
pub(super) const PLANES: usize = 3;

pub(crate) static SPLIT: Kernel<SplitScalars> = Kernel::new(
    "split",
    &[PRELUDE, include_str!("../../../kernels/split.cu")],
    &[Binding::read("x", F32), Binding::write("out", BF16)],
);

/// The planes of `x` in a new tensor `[3, ...x]`.
pub(super) fn run(gpu: &Arc<Gpu>, x: &Tensor) -> Result<Tensor> {
    let out = gpu.alloc(DType::Bf16, &[&[PLANES], x.shape()].concat())?;
    let blocks = x.len().div_ceil(THREADS as usize).min(BLOCKS * gpu.multiprocessors as usize);
    let tensors = [Some(x), Some(&out)];
    gpu.launch(Launch::new(&SPLIT, SplitScalars { count: word(x.len()) }, &tensors, blocks, THREADS))?;
    Ok(out)
}
