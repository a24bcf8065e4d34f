//! The row-wise ops: each file launches the kernels of its ops. They are bound by memory: threads read and write runs of
//! eight elements (`kernels/run.cuh`), and a sum over a row has a warp.

pub(crate) mod elementwise;
pub(crate) mod loss;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod reduce;
pub(crate) mod rotary;
pub(crate) mod rows;
pub(crate) mod swiglu;

use std::sync::Arc;

use dropless_core::launch::Program;
use dropless_core::ops::{Checked, Map};
use dropless_core::{Result, Tensor};

use crate::device::Gpu;
use crate::kernel::{Kernel, Launch, Scalars, word};

/// Every kernel of the row-wise ops.
#[cfg(test)]
pub(crate) fn kernels() -> Vec<&'static Program> {
    let mut all = dropless_core::map_ops!(each Op => <Op<'_> as RowWise>::KERNELS).concat();
    all.sort_by_key(|one| one.name);
    all.dedup_by_key(|one| one.name);
    all
}

pub(crate) fn run(gpu: &Arc<Gpu>, op: &Checked<Map<'_>>) -> Result<()> {
    dropless_core::map_ops!(match &**op, op => op.queue(gpu))
}

/// A row-wise op on this device.
trait RowWise {
    /// Every kernel that it runs.
    #[cfg_attr(not(test), expect(dead_code, reason = "the tests compile them"))]
    const KERNELS: &'static [&'static Program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()>;
}

/// Threads of a block, in all kernels here that do not say otherwise.
const THREADS: u32 = 128;
/// Elements of a run.
const RUN: usize = 8;

/// How often a kernel reads a row, which says how many warps of a multiprocessor take rows at once.
#[derive(Clone, Copy)]
enum Reads {
    /// As many as there is room for.
    Once = 64,
    /// So few that their rows stay in the caches until they are read again.
    Twice = 16,
}

/// Blocks for one thread for each of `count` things.
fn blocks(count: usize) -> usize {
    count.div_ceil(THREADS as usize)
}

/// Runs a kernel with one thread for each of `count` things.
fn threads<S: Scalars>(
    gpu: &Arc<Gpu>,
    kernel: &'static Kernel<S>,
    tensors: &[Option<&Tensor>],
    scalars: S,
    count: usize,
) -> Result<()> {
    gpu.launch(Launch::new(kernel, scalars, tensors, blocks(count), THREADS))
}

/// Elements that a launch takes at most, so that a word counts them.
const PIECE: usize = 1 << 31;

/// Runs a kernel with one thread for each run of elements of `flat`, which are of one length and whose shapes do not
/// matter; `whole` are its other tensors. `scalars` makes its scalars from the number of elements.
fn elements<S: Scalars>(
    gpu: &Arc<Gpu>,
    kernel: &'static Kernel<S>,
    flat: &[Option<&Tensor>],
    whole: &[Option<&Tensor>],
    scalars: impl Fn(u32) -> S,
) -> Result<()> {
    let len = flat.iter().flatten().map(|tensor| tensor.len()).next().unwrap_or(0);
    for from in (0..len).step_by(PIECE) {
        let to = len.min(from + PIECE);
        let piece = |tensor: &Tensor| tensor.reshape(&[len])?.slice(from, to);
        let pieces = flat.iter().map(|tensor| tensor.map(piece).transpose()).collect::<Result<Vec<_>>>()?;
        let tensors: Vec<_> = pieces.iter().map(Option::as_ref).chain(whole.iter().copied()).collect();
        threads(gpu, kernel, &tensors, scalars(word(to - from)), (to - from).div_ceil(RUN))?;
    }
    Ok(())
}

/// Runs a kernel whose threads take `count` things in turn, so that those past a limit on the device cost no blocks.
fn turns<S: Scalars>(
    gpu: &Arc<Gpu>,
    kernel: &'static Kernel<S>,
    tensors: &[Option<&Tensor>],
    scalars: S,
    count: usize,
    reads: Reads,
) -> Result<()> {
    let resident = gpu.multiprocessors as usize * reads as usize * 32;
    threads(gpu, kernel, tensors, scalars, count.min(resident))
}

/// Runs a kernel whose warps take the rows in turn.
fn warps<S: Scalars>(
    gpu: &Arc<Gpu>,
    kernel: &'static Kernel<S>,
    tensors: &[Option<&Tensor>],
    scalars: S,
    count: usize,
    reads: Reads,
) -> Result<()> {
    turns(gpu, kernel, tensors, scalars, count.saturating_mul(32), reads)
}
