//! Attention of bf16 operands on tensor cores. Kernels: kernels/attention_forward.cu and attention_grad_*.cu.

use std::ops::Range;

use dropless_core::ops::{AttentionBackward, AttentionForward, KEY_TILE};
use dropless_core::{DType, Error, Result, Tensor};

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

/// Slopes of a block of rows with a block of keys.
const SLOPES: usize = BLOCK * BLOCK;
/// Bytes of device memory for slopes between the two kernels of the backward pass; heads whose slopes do not fit take turns.
const SLOPES_BYTES: usize = 2 << 30;

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

pub(crate) static GRAD_QUERIES_STORED: Kernel<AttentionScalars> = Kernel::new(
    "attention_grad_queries_stored",
    &[
        PRELUDE,
        VISIBLE,
        SOFTMAX,
        SM90,
        RING,
        STEP,
        TILE,
        ALONE,
        include_str!("../../../../kernels/attention_grad_queries_stored.cu"),
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
        Binding::read("slopes", BF16),
        Binding::write("d_q", BF16),
    ],
)
.constants(&["BLOCK", "KEY_TILE", "WARPGROUPS", "CONTROL_BYTES", "QK", "V", "STAGES", "BOXES", "EACH"])
.maps(1);

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
        Binding::write("slopes", BF16).optional(),
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

    /// Warpgroups of the forward pass. Three have too few registers to bring in tiles without boxes.
    fn warpgroups(self, boxes: bool) -> usize {
        let three = boxes && self.qk <= 128 && self.v <= 128;
        if three { 3 } else { WARPGROUPS }
    }

    /// Blocks of rows of a warpgroup that computes the gradient of the queries from stored slopes.
    fn blocks_each(self) -> usize {
        if self.qk <= MOST_WITH_64_KEYS { 2 } else { 1 }
    }

    /// Bytes of a tile of so many rows of both heads: see kernels/attention_tile.cuh.
    fn tiles(self, rows: usize) -> usize {
        [self.qk, self.v].map(|columns| columns.div_ceil(SPAN) * SPAN * rows * size_of::<u16>()).iter().sum()
    }
}

impl Buffers {
    /// Of the forward pass: queries; keys and values.
    fn forward(heads: Heads, warpgroups: usize) -> Buffers {
        Buffers { held: Heads { v: 0, ..heads }.tiles(warpgroups * BLOCK), stage: heads.tiles(KEY_TILE) }
    }

    /// Of the gradient of the queries: queries and the result's gradient; keys and values.
    fn grad_queries(heads: Heads) -> Buffers {
        Buffers { held: heads.tiles(WARPGROUPS * BLOCK), stage: heads.tiles(heads.keys()) }
    }

    /// Of the gradient of the queries from stored slopes: slopes and keys.
    fn grad_queries_stored(heads: Heads) -> Buffers {
        let keys = Heads { v: 0, ..heads }.tiles(BLOCK);
        Buffers { held: 0, stage: WARPGROUPS * heads.blocks_each() * SLOPES * size_of::<u16>() + keys }
    }

    /// Of those of keys and values: keys and values; queries and the result's gradient; and slopes that are kept.
    fn grad_keys(heads: Heads, keep: bool) -> Buffers {
        let slopes = if keep { WARPGROUPS * SLOPES * size_of::<u16>() } else { 0 };
        Buffers { held: heads.tiles(WARPGROUPS * BLOCK) + slopes, stage: heads.tiles(BLOCK) }
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

/// A kernel over blocks of rows or keys.
struct Tiles<'a> {
    kernel: &'static Kernel<AttentionScalars>,
    tensors: &'a [Option<&'a Tensor>],
    sources: &'a [Source<'a>],
    heads: Heads,
    buffers: Buffers,
    /// The constants that only this kernel has.
    own: &'a [usize],
    /// Blocks of a thread block.
    blocks: usize,
    /// The key heads, sequence after sequence, and how many heads each of them stands for.
    range: Range<usize>,
    each: usize,
    warpgroups: usize,
}

impl Tiles<'_> {
    fn launch(self, pass: &Pass<'_>) -> Result<()> {
        let boxes = self.sources.iter().all(Source::in_boxes);
        let maps = if boxes {
            self.sources.iter().map(|source| source.map(pass)).collect::<Result<Vec<_>>>()?
        } else {
            vec![TensorMap::default(); self.sources.len()]
        };
        let Heads { qk, v } = self.heads;
        let mut constants =
            vec![BLOCK, KEY_TILE, self.warpgroups, CONTROL, qk, v, self.buffers.stages(), usize::from(boxes)];
        constants.extend(self.own);
        let (from, count) = (word(self.range.start), word(self.range.len()));
        let scalars = AttentionScalars { from, count, ..AttentionScalars::new(pass.shape) };
        let blocks = pass.blocks().div_ceil(self.blocks) * self.range.len() * self.each;
        pass.gpu.launch(Launch {
            constants: &constants.into_iter().map(word).collect::<Vec<_>>(),
            maps: &maps,
            shared: word(self.buffers.bytes()),
            ..Launch::new(self.kernel, scalars, self.tensors, blocks, word((1 + self.warpgroups) * WARPGROUP))
        })
    }
}

pub(super) fn forward(pass: &Pass<'_>, op: &AttentionForward<'_>) -> Result<()> {
    let heads = Heads::of(pass)?;
    let shape = pass.shape;
    let mut sources = [
        Source { tensor: op.q, heads: shape.heads, dim: shape.qk_dim, rows: WARPGROUPS * BLOCK },
        Source { tensor: op.k, heads: shape.kv_heads, dim: shape.qk_dim, rows: KEY_TILE },
        Source { tensor: op.v, heads: shape.kv_heads, dim: shape.v_dim, rows: KEY_TILE },
    ];
    let warpgroups = heads.warpgroups(sources.iter().all(Source::in_boxes));
    sources[0].rows = warpgroups * BLOCK;
    Tiles {
        kernel: &FORWARD,
        tensors: &[Some(op.q), Some(op.k), Some(op.v), pass.start, pass.first, Some(op.out), Some(op.lse)],
        sources: &sources,
        heads,
        buffers: Buffers::forward(heads, warpgroups),
        own: &[],
        blocks: warpgroups,
        range: 0..shape.batch * shape.kv_heads,
        each: shape.heads / shape.kv_heads,
        warpgroups,
    }
    .launch(pass)
}

pub(super) fn backward(pass: &Pass<'_>, op: &AttentionBackward<'_>, delta: &Tensor) -> Result<()> {
    let backward = Backward { pass, op, delta, heads: Heads::of(pass)? };
    let blocks = pass.blocks();
    let all = pass.shape.batch * pass.shape.kv_heads;
    // Of the rows of the query heads of one key head.
    let slopes = backward.members() * (blocks * (blocks + 1) / 2) * SLOPES;
    let together = (SLOPES_BYTES / size_of::<u16>() / slopes).min(all);
    if together == 0 {
        backward.queries(0..all)?;
        return backward.keys(0..all, None);
    }
    // As equal as can be.
    let turns = all.div_ceil(together);
    let slopes = pass.gpu.alloc(DType::Bf16, &[all.div_ceil(turns) * slopes])?;
    (0..turns).try_for_each(|turn| {
        let range = all * turn / turns..all * (turn + 1) / turns;
        backward.keys(range.clone(), Some(&slopes))?;
        backward.queries_stored(range, &slopes)
    })
}

struct Backward<'a> {
    pass: &'a Pass<'a>,
    op: &'a AttentionBackward<'a>,
    delta: &'a Tensor,
    heads: Heads,
}

impl Backward<'_> {
    /// Query heads of a key head.
    fn members(&self) -> usize {
        self.pass.shape.heads / self.pass.shape.kv_heads
    }

    fn tensors(&self) -> [Option<&Tensor>; 8] {
        let &AttentionBackward { q, k, v, lse, d_out, .. } = self.op;
        let [q, k, v, lse, delta, d_out] = [q, k, v, lse, self.delta, d_out].map(Some);
        [q, k, v, self.pass.start, self.pass.first, lse, delta, d_out]
    }

    fn sources(&self, rows: usize, keys: usize) -> [Source<'_>; 4] {
        let (shape, op) = (self.pass.shape, self.op);
        [
            Source { tensor: op.q, heads: shape.heads, dim: shape.qk_dim, rows },
            Source { tensor: op.d_out, heads: shape.heads, dim: shape.v_dim, rows },
            Source { tensor: op.k, heads: shape.kv_heads, dim: shape.qk_dim, rows: keys },
            Source { tensor: op.v, heads: shape.kv_heads, dim: shape.v_dim, rows: keys },
        ]
    }

    /// The gradients of keys and values, which leave the slopes behind.
    fn keys(&self, range: Range<usize>, slopes: Option<&Tensor>) -> Result<()> {
        let heads = self.heads;
        let parts: &[[usize; 2]] = if heads.qk + heads.v <= MOST_TOGETHER { &[[1, 1]] } else { &[[1, 0], [0, 1]] };
        parts.iter().try_for_each(|parts| {
            Tiles {
                kernel: &GRAD_KEYS,
                tensors: &[&self.tensors()[..], &[Some(self.op.d_k), Some(self.op.d_v), slopes]].concat(),
                sources: &self.sources(BLOCK, WARPGROUPS * BLOCK),
                heads,
                buffers: Buffers::grad_keys(heads, parts[0] == 1 && slopes.is_some()),
                own: parts,
                blocks: WARPGROUPS,
                range: range.clone(),
                each: 1,
                warpgroups: WARPGROUPS,
            }
            .launch(self.pass)
        })
    }

    fn queries_stored(&self, range: Range<usize>, slopes: &Tensor) -> Result<()> {
        let (heads, each) = (self.heads, self.heads.blocks_each());
        Tiles {
            kernel: &GRAD_QUERIES_STORED,
            tensors: &[&self.tensors()[..], &[Some(slopes), Some(self.op.d_q)]].concat(),
            sources: &self.sources(BLOCK, BLOCK)[2..3],
            heads,
            buffers: Buffers::grad_queries_stored(heads),
            own: &[each],
            blocks: WARPGROUPS * each,
            range,
            each: self.members(),
            warpgroups: WARPGROUPS,
        }
        .launch(self.pass)
    }

    /// The gradient of the queries where there is no room for slopes.
    fn queries(&self, range: Range<usize>) -> Result<()> {
        let (heads, keys) = (self.heads, self.heads.keys());
        Tiles {
            kernel: &GRAD_QUERIES,
            tensors: &[&self.tensors()[..], &[Some(self.op.d_q)]].concat(),
            sources: &self.sources(WARPGROUPS * BLOCK, keys),
            heads,
            buffers: Buffers::grad_queries(heads),
            own: &[keys],
            blocks: WARPGROUPS,
            range,
            each: self.members(),
            warpgroups: WARPGROUPS,
        }
        .launch(self.pass)
    }
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
        let all = |heads| {
            let stored = Buffers::grad_queries_stored(heads);
            [
                Buffers::forward(heads, heads.warpgroups(true)),
                Buffers::grad_keys(heads, true),
                Buffers::grad_queries(heads),
                stored,
            ]
        };
        for buffers in all(Heads { qk: MOST, v: MOST }) {
            assert!(buffers.stages() > 0 && buffers.bytes() <= SHARED, "{buffers:?}");
        }
        // What kernels/attention_grad_queries.cu relies on.
        assert!(Buffers::grad_queries(Heads { qk: MOST, v: MOST }).stages() > 1);
        // DeepSeek-V3's are loaded while others are worked on.
        assert_eq!(all(Heads { qk: 192, v: 128 }).map(Buffers::stages), [2, 3, 3, 3]);
    }
}
