//! Attention of bf16 operands on tensor cores. Kernels: kernels/attention_forward.cu and attention_grad_*.cu.

use dropless_core::ops::{AttentionBackward, AttentionForward, KEY_TILE};
use dropless_core::{Error, Result, Tensor};

use super::{BLOCK, OP, Params, Pass, SHARED, VISIBLE};
use crate::kernel::{BF16, Binding, F32, Kernel, PRELUDE, SM90, U32};

const TILE: &str = include_str!("../../../../kernels/attention_tile.cuh");

/// Warpgroups of a thread block, each with a block of rows or keys.
const WARPGROUPS: usize = 2;
const WARPGROUP: usize = 128;

/// Elements of the largest head whose chains fit into the registers of a warpgroup.
const MOST: usize = 256;
/// Elements of key and value together up to which a warpgroup holds the chains of both gradients.
const MOST_TOGETHER: usize = 320;

const CONSTANTS: &[&str] = &["BLOCK", "KEY_TILE", "WARPGROUPS", "QK", "V", "STAGES"];

pub(crate) static FORWARD: Kernel = Kernel {
    name: "attention_forward",
    files: &[PRELUDE, VISIBLE, SM90, TILE, include_str!("../../../../kernels/attention_forward.cu")],
    params: Params::DECLARATION,
    tensors: &[
        Binding::read("q", BF16),
        Binding::read("k", BF16),
        Binding::read("v", BF16),
        Binding::read("start", U32).optional(),
        Binding::read("first", U32).optional(),
        Binding::write("out", BF16),
        Binding::write("lse", F32),
    ],
    maps: 0,
    constants: CONSTANTS,
};

pub(crate) static GRAD_QUERIES: Kernel = Kernel {
    name: "attention_grad_queries",
    files: &[PRELUDE, VISIBLE, SM90, TILE, include_str!("../../../../kernels/attention_grad_queries.cu")],
    params: Params::DECLARATION,
    tensors: &[
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
    maps: 0,
    constants: CONSTANTS,
};

pub(crate) static GRAD_KEYS: Kernel = Kernel {
    name: "attention_grad_keys",
    files: &[PRELUDE, VISIBLE, SM90, TILE, include_str!("../../../../kernels/attention_grad_keys.cu")],
    params: Params::DECLARATION,
    tensors: &[
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
    maps: 0,
    constants: &["BLOCK", "KEY_TILE", "WARPGROUPS", "QK", "V", "STAGES", "GRAD_KEYS", "GRAD_VALUES"],
};

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

    /// Bytes of a tile of so many rows of both heads: see kernels/attention_tile.cuh.
    fn tiles(self, rows: usize) -> usize {
        [self.qk, self.v].map(|columns| columns.div_ceil(64) * rows * 128).iter().sum()
    }
}

impl Buffers {
    /// Of the forward pass: queries; keys and values.
    fn forward(heads: Heads) -> Buffers {
        Buffers { held: Heads { v: 0, ..heads }.tiles(WARPGROUPS * BLOCK), stage: heads.tiles(KEY_TILE) }
    }

    /// Of the gradient of the queries: queries and the result's gradient; keys and values.
    fn grad_queries(heads: Heads) -> Buffers {
        Buffers { held: heads.tiles(WARPGROUPS * BLOCK), stage: heads.tiles(BLOCK) }
    }

    /// Of those of keys and values: the other way round, and three numbers of each row.
    fn grad_keys(heads: Heads) -> Buffers {
        let Buffers { held, stage } = Buffers::grad_queries(heads);
        Buffers { held, stage: stage + 3 * BLOCK * size_of::<f32>() }
    }

    /// Two where there is room: the next is loaded while this one is worked on.
    fn stages(self) -> usize {
        if self.bytes(2) <= SHARED { 2 } else { 1 }
    }

    fn bytes(self, stages: usize) -> usize {
        self.held + stages * self.stage
    }
}

/// Queues a kernel over `blocks` blocks of rows or keys of each of `heads` heads, WARPGROUPS to a thread block.
fn launch(
    pass: &Pass<'_>,
    kernel: &'static Kernel,
    tensors: &[Option<&Tensor>],
    (heads, parts): (Heads, &[usize]),
    buffers: Buffers,
    count: usize,
) -> Result<()> {
    let stages = buffers.stages();
    let mut constants = vec![BLOCK, KEY_TILE, WARPGROUPS, heads.qk, heads.v, stages];
    constants.extend(parts);
    let blocks = pass.blocks().div_ceil(WARPGROUPS) * count;
    pass.launch(kernel, tensors, &constants, blocks, WARPGROUPS * WARPGROUP, buffers.bytes(stages))
}

pub(super) fn forward(pass: &Pass<'_>, op: &AttentionForward<'_>) -> Result<()> {
    let heads = Heads::of(pass)?;
    let tensors = &[Some(op.q), Some(op.k), Some(op.v), pass.start, pass.first, Some(op.out), Some(op.lse)];
    launch(pass, &FORWARD, tensors, (heads, &[]), Buffers::forward(heads), pass.shape.batch * pass.shape.heads)
}

pub(super) fn backward(pass: &Pass<'_>, op: &AttentionBackward<'_>, delta: &Tensor) -> Result<()> {
    let heads = Heads::of(pass)?;
    let [q, k, v, lse, delta, d_out] = [op.q, op.k, op.v, op.lse, delta, op.d_out].map(Some);

    let tensors = &[q, k, v, pass.start, pass.first, lse, delta, d_out, Some(op.d_q)];
    let buffers = Buffers::grad_queries(heads);
    launch(pass, &GRAD_QUERIES, tensors, (heads, &[]), buffers, pass.shape.batch * pass.shape.heads)?;

    let tensors = &[q, k, v, pass.start, pass.first, lse, delta, d_out, Some(op.d_k), Some(op.d_v)];
    let buffers = Buffers::grad_keys(heads);
    let parts: &[[usize; 2]] = if heads.qk + heads.v <= MOST_TOGETHER { &[[1, 1]] } else { &[[1, 0], [0, 1]] };
    parts.iter().try_for_each(|parts| {
        launch(pass, &GRAD_KEYS, tensors, (heads, parts), buffers, pass.shape.batch * pass.shape.kv_heads)
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
        let all = |heads| [Buffers::forward(heads), Buffers::grad_queries(heads), Buffers::grad_keys(heads)];
        for buffers in all(Heads { qk: MOST, v: MOST }) {
            assert!(buffers.bytes(buffers.stages()) <= SHARED, "{buffers:?}");
        }
        // DeepSeek-V3's are loaded while others are worked on.
        for buffers in all(Heads { qk: 192, v: 128 }) {
            assert_eq!(buffers.stages(), 2, "{buffers:?}");
        }
    }
}
