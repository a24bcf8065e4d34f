//! Attention in chains of f32 fma: f32 operands, and all under the model `F32`. Kernels: kernels/attention_f32_*.cu.

use dropless_core::ops::{AttentionBackward, AttentionForward, KEY_TILE};
use dropless_core::{Result, Tensor};

use super::{AttentionScalars, BLOCK, LANES, Pass, SOFTMAX, VISIBLE, WARPS};
use crate::kernel::{Binding, F32, FLOAT, Kernel, PRELUDE, U32};

const CHAINS: &str = include_str!("../../../../kernels/attention_f32.cuh");
const CONSTANTS: &[&str] = &["WARPS", "BLOCK", "KEY_TILE"];
const VALUES: [usize; 3] = [WARPS, BLOCK, KEY_TILE];

pub(crate) static FORWARD: Kernel<AttentionScalars> = Kernel::new(
    "attention_f32_forward",
    &[PRELUDE, VISIBLE, SOFTMAX, CHAINS, include_str!("../../../../kernels/attention_f32_forward.cu")],
    &[
        Binding::read("q", FLOAT),
        Binding::read("k", FLOAT),
        Binding::read("v", FLOAT),
        Binding::read("start", U32).optional(),
        Binding::read("first", U32).optional(),
        Binding::write("out", FLOAT),
        Binding::write("lse", F32),
    ],
)
.constants(CONSTANTS);

pub(crate) static GRAD_QUERIES: Kernel<AttentionScalars> = Kernel::new(
    "attention_f32_grad_queries",
    &[PRELUDE, VISIBLE, SOFTMAX, CHAINS, include_str!("../../../../kernels/attention_f32_grad_queries.cu")],
    &[
        Binding::read("q", FLOAT),
        Binding::read("k", FLOAT),
        Binding::read("v", FLOAT),
        Binding::read("start", U32).optional(),
        Binding::read("first", U32).optional(),
        Binding::read("lse", F32),
        Binding::read("delta", F32),
        Binding::read("d_out", FLOAT),
        Binding::write("d_q", FLOAT),
    ],
)
.constants(CONSTANTS);

pub(crate) static GRAD_KEYS: Kernel<AttentionScalars> = Kernel::new(
    "attention_f32_grad_keys",
    &[PRELUDE, VISIBLE, SOFTMAX, CHAINS, include_str!("../../../../kernels/attention_f32_grad_keys.cu")],
    &[
        Binding::read("q", FLOAT),
        Binding::read("k", FLOAT),
        Binding::read("v", FLOAT),
        Binding::read("start", U32).optional(),
        Binding::read("first", U32).optional(),
        Binding::read("lse", F32),
        Binding::read("delta", F32),
        Binding::read("d_out", FLOAT),
        Binding::write("d_k", FLOAT),
        Binding::write("d_v", FLOAT),
    ],
)
.constants(CONSTANTS);

pub(super) fn forward(pass: &Pass<'_>, op: &AttentionForward<'_>) -> Result<()> {
    let shape = pass.shape;
    let tensors = &[Some(op.q), Some(op.k), Some(op.v), pass.start, pass.first, Some(op.out), Some(op.lse)];
    let shared = KEY_TILE + shape.qk_dim + shape.v_dim;
    pass.launch_warps(&FORWARD, tensors, &VALUES, pass.tokens() * shape.heads, shared)
}

pub(super) fn backward(pass: &Pass<'_>, op: &AttentionBackward<'_>, delta: &Tensor) -> Result<()> {
    let shape = pass.shape;
    let [q, k, v, lse, delta, d_out] = [op.q, op.k, op.v, op.lse, delta, op.d_out].map(Some);

    let tensors = &[q, k, v, pass.start, pass.first, lse, delta, d_out, Some(op.d_q)];
    let shared = KEY_TILE + 2 * shape.qk_dim + shape.v_dim;
    pass.launch_warps(&GRAD_QUERIES, tensors, &VALUES, pass.tokens() * shape.heads, shared)?;

    let tensors = &[q, k, v, pass.start, pass.first, lse, delta, d_out, Some(op.d_k), Some(op.d_v)];
    let shared = 2 * (LANES + shape.qk_dim + shape.v_dim);
    pass.launch_warps(&GRAD_KEYS, tensors, &VALUES, pass.tokens() * shape.kv_heads, shared)
}
