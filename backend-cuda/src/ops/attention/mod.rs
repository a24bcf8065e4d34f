//! Attention. NUMERICS.md, "Attention".
//!
//! bf16 operands go through the tensor cores in tiles, unless the model is `F32`; everything else is a chain of f32 fma,
//! with a warp for each row. Both go through the keys block of rows by block of rows. Besides its tensors
//! an op takes one number for each row and head (backward) and one for each block of rows of a sequence (with documents).

pub(crate) mod chains;
pub(crate) mod tensor_core;

use std::sync::Arc;

use dropless_core::ops::{Attention, AttentionBackward, AttentionShape};
use dropless_core::{Checked, DType, Error, NumericModel, Result, Tensor};

use crate::device::Gpu;
use crate::kernel::{Binding, F32, FLOAT, Kernel, Launch, PRELUDE, U32, scalars, word};

const OP: &str = "attention";

/// Rows of a block: those of a warpgroup. No bit depends on it.
const BLOCK: usize = 64;

/// Warps of a thread block where each has its own row, key or block of rows.
const WARPS: usize = 4;

const LANES: usize = 32;

/// Bytes of shared memory that a thread block may have.
const SHARED: usize = 227 << 10;

const SOFTMAX: &str = include_str!("../../../../kernels/attention_softmax.cuh");
const VISIBLE: &str = include_str!("../../../../kernels/attention_visible.cuh");

scalars!(
    /// The extents; `blocks`: blocks of rows of a sequence; `scale`: the bits of the scores' factor. The launch is for `count`
    /// key heads, sequence after sequence, from `from` on.
    pub(crate) struct AttentionScalars { batch, sequence, heads, kv_heads, qk_dim, v_dim, blocks, scale, from, count }
);

impl AttentionScalars {
    fn new(shape: AttentionShape) -> AttentionScalars {
        AttentionScalars {
            batch: word(shape.batch),
            sequence: word(shape.sequence),
            heads: word(shape.heads),
            kv_heads: word(shape.kv_heads),
            qk_dim: word(shape.qk_dim),
            v_dim: word(shape.v_dim),
            blocks: word(shape.sequence.div_ceil(BLOCK)),
            scale: shape.scale.to_bits(),
            from: 0,
            count: word(shape.batch * shape.kv_heads),
        }
    }
}

pub(crate) static FIRST: Kernel<AttentionScalars> = Kernel::new(
    "attention_first",
    &[PRELUDE, include_str!("../../../../kernels/attention_first.cu")],
    &[Binding::read("start", U32), Binding::write("first", U32)],
)
.constants(&["WARPS", "BLOCK"]);

pub(crate) static DELTA: Kernel<AttentionScalars> = Kernel::new(
    "attention_delta",
    &[PRELUDE, include_str!("../../../../kernels/attention_delta.cu")],
    &[Binding::read("d_out", FLOAT), Binding::read("out", FLOAT), Binding::write("delta", F32)],
)
.constants(&["WARPS"]);

pub(crate) fn run(gpu: &Arc<Gpu>, op: &Checked<Attention<'_>>, model: NumericModel) -> Result<()> {
    let (q, shape, start) = match &**op {
        Attention::Forward(op) => (op.q, op.shape, op.start),
        Attention::Backward(op) => (op.q, op.shape, op.start),
    };
    if q.is_empty() {
        return Ok(());
    }
    let on_tensor_cores = q.dtype() == DType::Bf16 && model != NumericModel::F32;
    let mut pass = Pass { gpu, shape, start, first: None };
    let first = start.map(|start| pass.first(start)).transpose()?;
    pass.first = first.as_ref();
    match &**op {
        Attention::Forward(op) if on_tensor_cores => tensor_core::forward(&pass, op),
        Attention::Forward(op) => chains::forward(&pass, op),
        Attention::Backward(op) => {
            let delta = &pass.delta(op)?;
            if on_tensor_cores { tensor_core::backward(&pass, op, delta) } else { chains::backward(&pass, op, delta) }
        }
    }
}

/// What every kernel of an op needs.
#[derive(Debug)]
struct Pass<'a> {
    gpu: &'a Arc<Gpu>,
    shape: AttentionShape,
    start: Option<&'a Tensor>,
    /// The first visible key of each block of rows.
    first: Option<&'a Tensor>,
}

impl Pass<'_> {
    /// Blocks of rows of a sequence.
    fn blocks(&self) -> usize {
        self.shape.sequence.div_ceil(BLOCK)
    }

    fn tokens(&self) -> usize {
        self.shape.batch * self.shape.sequence
    }

    fn first(&self, start: &Tensor) -> Result<Tensor> {
        let first = self.gpu.alloc(DType::U32, &[self.shape.batch, self.blocks()])?;
        self.launch_warps(&FIRST, &[Some(start), Some(&first)], &[WARPS, BLOCK], first.len(), 0)?;
        Ok(first)
    }

    fn delta(&self, op: &AttentionBackward<'_>) -> Result<Tensor> {
        let delta = self.gpu.alloc(DType::F32, &[self.tokens(), self.shape.heads])?;
        self.launch_warps(&DELTA, &[Some(op.d_out), Some(op.out), Some(&delta)], &[WARPS], delta.len(), 0)?;
        Ok(delta)
    }

    /// Queues a kernel in which each of `items` has a warp, and a warp `shared` numbers in shared memory.
    fn launch_warps(
        &self,
        kernel: &'static Kernel<AttentionScalars>,
        tensors: &[Option<&Tensor>],
        constants: &[usize],
        items: usize,
        shared: usize,
    ) -> Result<()> {
        let bytes = WARPS * shared * size_of::<f32>();
        if bytes > SHARED {
            let hint = "heads of fewer elements".into();
            return Err(Error::Capacity { op: OP, needed: bytes as u64, available: SHARED as u64, hint });
        }
        let (scalars, blocks) = (AttentionScalars::new(self.shape), items.div_ceil(WARPS));
        self.gpu.launch(Launch {
            constants: &constants.iter().copied().map(word).collect::<Vec<_>>(),
            shared: word(bytes),
            ..Launch::new(kernel, scalars, tensors, blocks, word(WARPS * LANES))
        })
    }
}
