//! Attention of bf16 operands on tensor cores. Kernels: kernels/attention_forward.cu and attention_grad_*.cu.

use dropless_core::ops::{AttentionBackward, AttentionForward, KEY_TILE};
use dropless_core::{Error, Result, Tensor};

use super::{AttentionScalars, BLOCK, OP, Pass, SHARED, SOFTMAX, VISIBLE};
use crate::driver::TensorMap;
use crate::kernel::{BF16, Binding, F32, Kernel, Launch, PRELUDE, RING, SM90, U32, word};

const STEP: &str = include_str!("../../../../kernels/tensor_core_step.cuh");
const TILE: &str = include_str!("../../../../kernels/attention_tile.cuh");
const ALONE: &str = include_str!("../../../../kernels/attention_alone.cuh");

/// Warpgroups of a thread block that multiply, each with a block of rows or keys; one more brings in what they read.
const WARPGROUPS: usize = 2;
const WARPGROUP: usize = 128;

/// Elements of the largest head whose chains fit into the registers of a warpgroup.
const MOST: usize = 256;
/// Elements of the largest query for whose chains and 64 keys at a time there are registers; beyond it is 32.
const MOST_WITH_64_KEYS: usize = 192;
/// Elements of key and value together up to which a warpgroup holds the chains of both gradients.
const MOST_TOGETHER: usize = 320;

/// More stages bring no more speed.
const MOST_STAGES: usize = 4;
/// Bytes of shared memory for barriers and what else a kernel keeps beside its tiles.
const CONTROL: usize = 4 << 10;

/// Columns of a box of TMA: 128 bytes.
const SPAN: usize = 64;
/// Bytes at whose multiples the rows of a box start.
const ALIGNMENT: usize = 16;

pub(crate) static FORWARD: Kernel<AttentionScalars> = Kernel::new(
    "attention_forward",
    &[
        PRELUDE,
        VISIBLE,
        SOFTMAX,
        SM90,
        RING,
        STEP,
        TILE,
        ALONE,
        include_str!("../../../../kernels/attention_forward.cu"),
    ],
    &[
        Binding::read("q", BF16),
        Binding::read("k", BF16),
        Binding::read("v", BF16),
        Binding::read("start", U32).optional(),
        Binding::read("first", U32).optional(),
        Binding::write("out", BF16),
        Binding::write("lse", F32),
    ],
)
.constants(&["BLOCK", "KEY_TILE", "WARPGROUPS", "CONTROL_BYTES", "QK", "V", "STAGES", "BOXES"])
.maps(3);

pub(crate) static GRAD_QUERIES: Kernel<AttentionScalars> = Kernel::new(
    "attention_grad_queries",
    &[
        PRELUDE,
        VISIBLE,
        SOFTMAX,
        SM90,
        RING,
        STEP,
        TILE,
        ALONE,
        include_str!("../../../../kernels/attention_grad_queries.cu"),
    ],
    &[
        Binding::read("q", BF16),
        Binding::read("k", BF16),
        Binding::read("v", BF16),
        Binding::read("start", U32).optional(),
        Binding::read("first", U32).optional(),
        Binding::read("lse", F32),
        Binding::read("delta", F32),
        Binding::read("d_out", BF16),
        Binding::write("d_q", BF16),
    ],
)
.constants(&["BLOCK", "KEY_TILE", "WARPGROUPS", "CONTROL_BYTES", "QK", "V", "STAGES", "BOXES", "KEYS"])
.maps(4);

pub(crate) static GRAD_KEYS: Kernel<AttentionScalars> = Kernel::new(
    "attention_grad_keys",
    &[
        PRELUDE,
        VISIBLE,
        SOFTMAX,
        SM90,
        RING,
        STEP,
        TILE,
        ALONE,
        include_str!("../../../../kernels/attention_grad_keys.cu"),
    ],
    &[
        Binding::read("q", BF16),
        Binding::read("k", BF16),
        Binding::read("v", BF16),
        Binding::read("start", U32).optional(),
        Binding::read("first", U32).optional(),
        Binding::read("lse", F32),
        Binding::read("delta", F32),
        Binding::read("d_out", BF16),
        Binding::write("d_k", BF16),
        Binding::write("d_v", BF16),
    ],
)
.constants(&[
    "BLOCK",
    "KEY_TILE",
    "WARPGROUPS",
    "CONTROL_BYTES",
    "QK",
    "V",
    "STAGES",
    "BOXES",
    "GRAD_KEYS",
    "GRAD_VALUES",
])
.maps(4);

/// The elements of a head, padded to what the kernels' pieces take.
fn padded(dim: usize) -> usize {
    match dim {
        0..=16 => 16,
        17..=32 => 32,
        _ => dim.next_multiple_of(64),
    }
}

/// The padded heads of an op.
#[derive(Clone, Copy, Debug)]
struct Heads {
    qk: usize,
    v: usize,
}

/// What a kernel keeps in shared memory: `held` bytes for its own rows or keys, and stages for those that go by.
#[derive(Clone, Copy, Debug)]
struct Buffers {
    held: usize,
    stage: usize,
}

/// A tensor `[batch * sequence, heads * dim]` that is read in tiles of so many rows.
#[derive(Clone, Copy, Debug)]
struct Source<'a> {
    tensor: &'a Tensor,
    heads: usize,
    dim: usize,
    rows: usize,
}

impl Heads {
    fn of(pass: &Pass<'_>) -> Result<Heads> {
        for (field, dim) in [("qk_dim", pass.shape.qk_dim), ("v_dim", pass.shape.v_dim)] {
            if dim > MOST {
                let expected = format!("at most {MOST} for bf16 on tensor cores");
                return Err(Error::Argument { op: OP, field, expected, found: dim.to_string() });
            }
        }
        Ok(Heads { qk: padded(pass.shape.qk_dim), v: padded(pass.shape.v_dim) })
    }

    /// Keys that go by at a time where the gradient of the queries is computed.
    fn keys(self) -> usize {
        if self.qk <= MOST_WITH_64_KEYS { 64 } else { 32 }
    }

    /// Bytes of a tile of so many rows of both heads: see kernels/attention_tile.cuh.
    fn tiles(self, rows: usize) -> usize {
        [self.qk, self.v].map(|columns| columns.div_ceil(SPAN) * SPAN * rows * size_of::<u16>()).iter().sum()
    }
}

impl Buffers {
    /// Of the forward pass: queries; keys and values.
    fn forward(heads: Heads) -> Buffers {
        Buffers { held: Heads { v: 0, ..heads }.tiles(WARPGROUPS * BLOCK), stage: heads.tiles(KEY_TILE) }
    }

    /// Of the gradient of the queries: queries and the result's gradient; keys and values.
    fn grad_queries(heads: Heads) -> Buffers {
        Buffers { held: heads.tiles(WARPGROUPS * BLOCK), stage: heads.tiles(heads.keys()) }
    }

    /// Of those of keys and values: keys and values; queries and the result's gradient.
    fn grad_keys(heads: Heads) -> Buffers {
        Buffers { held: heads.tiles(WARPGROUPS * BLOCK), stage: heads.tiles(BLOCK) }
    }

    /// As many as there is room for, so that the next are loaded while others are worked on.
    fn stages(self) -> usize {
        ((SHARED - CONTROL - self.held) / self.stage).min(MOST_STAGES)
    }

    fn bytes(self) -> usize {
        self.held + self.stages() * self.stage + CONTROL
    }
}

impl Source<'_> {
    /// Whether TMA can read it.
    fn in_boxes(&self) -> bool {
        [self.tensor.offset(), self.dim].iter().all(|elements| (elements * size_of::<u16>()).is_multiple_of(ALIGNMENT))
    }

    fn map(&self, pass: &Pass<'_>) -> Result<TensorMap> {
        let extents = [self.dim, self.heads, pass.shape.sequence, pass.shape.batch];
        pass.gpu.tensor_map(OP, self.tensor, extents, [SPAN, 1, self.rows, 1])
    }
}

/// Queues a kernel over the blocks of rows or keys of each of `count` heads of a sequence, WARPGROUPS to a thread block.
/// `own`: the constants that only this kernel has.
fn launch(
    pass: &Pass<'_>,
    kernel: &'static Kernel<AttentionScalars>,
    tensors: &[Option<&Tensor>],
    sources: &[Source<'_>],
    (heads, buffers): (Heads, Buffers),
    own: &[usize],
    count: usize,
) -> Result<()> {
    let boxes = sources.iter().all(Source::in_boxes);
    let maps = if boxes {
        sources.iter().map(|source| source.map(pass)).collect::<Result<Vec<_>>>()?
    } else {
        vec![TensorMap::default(); sources.len()]
    };
    let mut constants =
        vec![BLOCK, KEY_TILE, WARPGROUPS, CONTROL, heads.qk, heads.v, buffers.stages(), usize::from(boxes)];
    constants.extend(own);
    let (scalars, threads) = (AttentionScalars::new(pass.shape), word((1 + WARPGROUPS) * WARPGROUP));
    let blocks = pass.blocks().div_ceil(WARPGROUPS) * pass.shape.batch * count;
    pass.gpu.launch(Launch {
        constants: &constants.into_iter().map(word).collect::<Vec<_>>(),
        maps: &maps,
        shared: word(buffers.bytes()),
        ..Launch::new(kernel, scalars, tensors, blocks, threads)
    })
}

pub(super) fn forward(pass: &Pass<'_>, op: &AttentionForward<'_>) -> Result<()> {
    let heads = Heads::of(pass)?;
    let shape = pass.shape;
    let tensors = &[Some(op.q), Some(op.k), Some(op.v), pass.start, pass.first, Some(op.out), Some(op.lse)];
    let sources = [
        Source { tensor: op.q, heads: shape.heads, dim: shape.qk_dim, rows: WARPGROUPS * BLOCK },
        Source { tensor: op.k, heads: shape.kv_heads, dim: shape.qk_dim, rows: KEY_TILE },
        Source { tensor: op.v, heads: shape.kv_heads, dim: shape.v_dim, rows: KEY_TILE },
    ];
    launch(pass, &FORWARD, tensors, &sources, (heads, Buffers::forward(heads)), &[], shape.heads)
}

pub(super) fn backward(pass: &Pass<'_>, op: &AttentionBackward<'_>, delta: &Tensor) -> Result<()> {
    let heads = Heads::of(pass)?;
    let shape = pass.shape;
    let [q, k, v, lse, delta, d_out] = [op.q, op.k, op.v, op.lse, delta, op.d_out].map(Some);
    let sources = |rows, keys| {
        [
            Source { tensor: op.q, heads: shape.heads, dim: shape.qk_dim, rows },
            Source { tensor: op.d_out, heads: shape.heads, dim: shape.v_dim, rows },
            Source { tensor: op.k, heads: shape.kv_heads, dim: shape.qk_dim, rows: keys },
            Source { tensor: op.v, heads: shape.kv_heads, dim: shape.v_dim, rows: keys },
        ]
    };

    let tensors = &[q, k, v, pass.start, pass.first, lse, delta, d_out, Some(op.d_q)];
    let keys = heads.keys();
    let memory = (heads, Buffers::grad_queries(heads));
    launch(pass, &GRAD_QUERIES, tensors, &sources(WARPGROUPS * BLOCK, keys), memory, &[keys], shape.heads)?;

    let tensors = &[q, k, v, pass.start, pass.first, lse, delta, d_out, Some(op.d_k), Some(op.d_v)];
    let memory = (heads, Buffers::grad_keys(heads));
    let parts: &[[usize; 2]] = if heads.qk + heads.v <= MOST_TOGETHER { &[[1, 1]] } else { &[[1, 0], [0, 1]] };
    parts.iter().try_for_each(|parts| {
        launch(pass, &GRAD_KEYS, tensors, &sources(BLOCK, WARPGROUPS * BLOCK), memory, parts, shape.kv_heads)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_padded_to_what_an_instruction_takes() {
        for (dim, expected) in
            [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (192, 192), (250, 256)]
        {
            assert_eq!(padded(dim), expected, "{dim}");
        }
    }

    #[test]
    fn the_largest_heads_fit_into_shared_memory() {
        let all = |heads| [Buffers::forward(heads), Buffers::grad_keys(heads), Buffers::grad_queries(heads)];
        for buffers in all(Heads { qk: MOST, v: MOST }) {
            assert!(buffers.stages() > 0 && buffers.bytes() <= SHARED, "{buffers:?}");
        }
        // What kernels/attention_grad_queries.cu relies on.
        assert!(Buffers::grad_queries(Heads { qk: MOST, v: MOST }).stages() > 1);
        // DeepSeek-V3's are loaded while others are worked on.
        assert_eq!(all(Heads { qk: 192, v: 128 }).map(Buffers::stages), [2, 3, 3]);
    }
}
