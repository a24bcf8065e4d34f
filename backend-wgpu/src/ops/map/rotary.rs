//! Rotary embedding, and the assembly of latent attention.

use dropless_core::Result;
use dropless_core::ops::{Mla, MlaGrad, MlaShape, Rotary};

use super::elements;
use crate::dispatch::Stream;
use crate::shader::{Binding, F32, FLOAT, FORMATS, PRELUDE, ROTATE, Shader, U32, scalars, word};

scalars!(
    /// `elements`: pairs; `half`: pairs of a head.
    pub(crate) struct RotaryScalars { elements, columns, half, inverse }
);

pub(crate) static ROTARY: Shader<RotaryScalars> = Shader::new(
    "rotary",
    &[PRELUDE, FORMATS, ROTATE, include_str!("../../../../shaders/rotary.wgsl")],
    &[
        Binding::read("x", FLOAT),
        Binding::read("positions", U32),
        Binding::read("cos", F32),
        Binding::read("sin", F32),
        Binding::write("out", FLOAT),
    ],
);

scalars!(
    /// Extents; `elements`: all queries.
    pub(crate) struct QueryScalars { elements, heads, nope, rope, inverse }
);

pub(crate) static MLA_QUERY: Shader<QueryScalars> = Shader::new(
    "mla_query",
    &[PRELUDE, FORMATS, ROTATE, include_str!("../../../../shaders/mla_query.wgsl")],
    &[
        Binding::read("x", FLOAT),
        Binding::read("positions", U32),
        Binding::read("cos", F32),
        Binding::read("sin", F32),
        Binding::write("out", FLOAT),
    ],
);

scalars!(
    /// Extents; `elements`: what is written.
    pub(crate) struct KeyValueScalars { elements, heads, nope, rope, v }
);

pub(crate) static MLA_KEY_VALUE: Shader<KeyValueScalars> = Shader::new(
    "mla_key_value",
    &[PRELUDE, FORMATS, ROTATE, include_str!("../../../../shaders/mla_key_value.wgsl")],
    &[
        Binding::read("kv", FLOAT),
        Binding::read("k_rope", FLOAT),
        Binding::read("positions", U32),
        Binding::read("cos", F32),
        Binding::read("sin", F32),
        Binding::write("k", FLOAT),
        Binding::write("v", FLOAT),
    ],
);

pub(crate) static MLA_KEY_VALUE_GRAD: Shader<KeyValueScalars> = Shader::new(
    "mla_key_value_grad",
    &[PRELUDE, FORMATS, ROTATE, include_str!("../../../../shaders/mla_key_value_grad.wgsl")],
    &[
        Binding::read("d_k", FLOAT),
        Binding::read("d_v", FLOAT),
        Binding::read("positions", U32),
        Binding::read("cos", F32),
        Binding::read("sin", F32),
        Binding::write("d_kv", FLOAT),
        Binding::write("d_k_rope", FLOAT),
    ],
);

pub(super) fn rotary(stream: &Stream, op: &Rotary<'_>) -> Result<()> {
    let pairs = op.x.len() / 2;
    let scalars = RotaryScalars {
        elements: word(pairs),
        columns: word(op.x.cols()),
        half: word(op.cos.cols()),
        inverse: u32::from(op.inverse),
    };
    let tensors = [Some(op.x), Some(op.positions), Some(op.cos), Some(op.sin), Some(op.out)];
    elements(stream, &ROTARY, &tensors, scalars, pairs)
}

fn queries(shape: MlaShape, count: usize, inverse: bool) -> QueryScalars {
    let MlaShape { heads, nope, rope, .. } = shape;
    let inverse = u32::from(inverse);
    QueryScalars { elements: word(count), heads: word(heads), nope: word(nope), rope: word(rope), inverse }
}

fn keys_and_values(shape: MlaShape, count: usize) -> KeyValueScalars {
    let MlaShape { heads, nope, rope, v } = shape;
    KeyValueScalars { elements: word(count), heads: word(heads), nope: word(nope), rope: word(rope), v: word(v) }
}

pub(super) fn mla(stream: &Stream, op: &Mla<'_>) -> Result<()> {
    let [positions, cos, sin] = [Some(op.positions), Some(op.cos), Some(op.sin)];
    let count = op.q.len();
    let tensors = [Some(op.q_in), positions, cos, sin, Some(op.q)];
    elements(stream, &MLA_QUERY, &tensors, queries(op.shape, count, false), count)?;
    let count = op.k.len() + op.v.len();
    let tensors = [Some(op.kv), Some(op.k_rope), positions, cos, sin, Some(op.k), Some(op.v)];
    elements(stream, &MLA_KEY_VALUE, &tensors, keys_and_values(op.shape, count), count)
}

pub(super) fn mla_grad(stream: &Stream, op: &MlaGrad<'_>) -> Result<()> {
    let [positions, cos, sin] = [Some(op.positions), Some(op.cos), Some(op.sin)];
    let count = op.d_q.len();
    let tensors = [Some(op.d_q), positions, cos, sin, Some(op.d_q_in)];
    elements(stream, &MLA_QUERY, &tensors, queries(op.shape, count, true), count)?;
    let count = op.d_kv.len() + op.d_k_rope.len();
    let tensors = [Some(op.d_k), Some(op.d_v), positions, cos, sin, Some(op.d_kv), Some(op.d_k_rope)];
    elements(stream, &MLA_KEY_VALUE_GRAD, &tensors, keys_and_values(op.shape, count), count)
}
