//! Rotary embedding, and the assembly of latent attention.

use dropless_core::Result;
use dropless_core::ops::{Mla, MlaGrad, MlaShape, Rotary};

use super::{RowWise, elements};
use crate::dispatch::{Stream, word};
use crate::shader::{Binding, F32, FLOAT, FORMATS, PRELUDE, ROTATE, Shader, U32, params};

params!(
    /// `elements`: pairs; `half`: pairs of a head.
    RotaryParams { elements, columns, half, inverse }
);

pub(crate) static ROTARY: Shader = Shader {
    name: "rotary",
    files: &[PRELUDE, FORMATS, ROTATE, include_str!("../../../../shaders/rotary.wgsl")],
    params: RotaryParams::FIELDS,
    bindings: &[
        Binding::read("x", FLOAT),
        Binding::read("positions", U32),
        Binding::read("cos", F32),
        Binding::read("sin", F32),
        Binding::write("out", FLOAT),
    ],
    constants: &[],
};

params!(
    /// Extents; `elements`: all queries.
    QueryParams { elements, heads, nope, rope, inverse }
);

pub(crate) static MLA_QUERY: Shader = Shader {
    name: "mla_query",
    files: &[PRELUDE, FORMATS, ROTATE, include_str!("../../../../shaders/mla_query.wgsl")],
    params: QueryParams::FIELDS,
    bindings: &[
        Binding::read("x", FLOAT),
        Binding::read("positions", U32),
        Binding::read("cos", F32),
        Binding::read("sin", F32),
        Binding::write("out", FLOAT),
    ],
    constants: &[],
};

params!(
    /// Extents; `elements`: what is written.
    KeyValueParams { elements, heads, nope, rope, v }
);

pub(crate) static MLA_KEY_VALUE: Shader = Shader {
    name: "mla_key_value",
    files: &[PRELUDE, FORMATS, ROTATE, include_str!("../../../../shaders/mla_key_value.wgsl")],
    params: KeyValueParams::FIELDS,
    bindings: &[
        Binding::read("kv", FLOAT),
        Binding::read("k_rope", FLOAT),
        Binding::read("positions", U32),
        Binding::read("cos", F32),
        Binding::read("sin", F32),
        Binding::write("k", FLOAT),
        Binding::write("v", FLOAT),
    ],
    constants: &[],
};

pub(crate) static MLA_KEY_VALUE_GRAD: Shader = Shader {
    name: "mla_key_value_grad",
    files: &[PRELUDE, FORMATS, ROTATE, include_str!("../../../../shaders/mla_key_value_grad.wgsl")],
    params: KeyValueParams::FIELDS,
    bindings: &[
        Binding::read("d_k", FLOAT),
        Binding::read("d_v", FLOAT),
        Binding::read("positions", U32),
        Binding::read("cos", F32),
        Binding::read("sin", F32),
        Binding::write("d_kv", FLOAT),
        Binding::write("d_k_rope", FLOAT),
    ],
    constants: &[],
};

impl RowWise for Rotary<'_> {
    const SHADERS: &'static [&'static Shader] = &[&ROTARY];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let pairs = self.x.len() / 2;
        let params = RotaryParams {
            elements: word(pairs),
            columns: word(self.x.cols()),
            half: word(self.cos.cols()),
            inverse: u32::from(self.inverse),
        };
        let tensors = [Some(self.x), Some(self.positions), Some(self.cos), Some(self.sin), Some(self.out)];
        elements(stream, &ROTARY, &tensors, params.words(), pairs)
    }
}

fn queries(shape: MlaShape, count: usize, inverse: bool) -> QueryParams {
    let MlaShape { heads, nope, rope, .. } = shape;
    let inverse = u32::from(inverse);
    QueryParams { elements: word(count), heads: word(heads), nope: word(nope), rope: word(rope), inverse }
}

fn keys_and_values(shape: MlaShape, count: usize) -> KeyValueParams {
    let MlaShape { heads, nope, rope, v } = shape;
    KeyValueParams { elements: word(count), heads: word(heads), nope: word(nope), rope: word(rope), v: word(v) }
}

impl RowWise for Mla<'_> {
    const SHADERS: &'static [&'static Shader] = &[&MLA_QUERY, &MLA_KEY_VALUE];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let [positions, cos, sin] = [Some(self.positions), Some(self.cos), Some(self.sin)];
        let count = self.q.len();
        let tensors = [Some(self.q_in), positions, cos, sin, Some(self.q)];
        elements(stream, &MLA_QUERY, &tensors, queries(self.shape, count, false).words(), count)?;
        let count = self.k.len() + self.v.len();
        let tensors = [Some(self.kv), Some(self.k_rope), positions, cos, sin, Some(self.k), Some(self.v)];
        elements(stream, &MLA_KEY_VALUE, &tensors, keys_and_values(self.shape, count).words(), count)
    }
}

impl RowWise for MlaGrad<'_> {
    const SHADERS: &'static [&'static Shader] = &[&MLA_QUERY, &MLA_KEY_VALUE_GRAD];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let [positions, cos, sin] = [Some(self.positions), Some(self.cos), Some(self.sin)];
        let count = self.d_q.len();
        let tensors = [Some(self.d_q), positions, cos, sin, Some(self.d_q_in)];
        elements(stream, &MLA_QUERY, &tensors, queries(self.shape, count, true).words(), count)?;
        let count = self.d_kv.len() + self.d_k_rope.len();
        let tensors = [Some(self.d_k), Some(self.d_v), positions, cos, sin, Some(self.d_kv), Some(self.d_k_rope)];
        elements(stream, &MLA_KEY_VALUE_GRAD, &tensors, keys_and_values(self.shape, count).words(), count)
    }
}
