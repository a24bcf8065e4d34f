//! Rotary embedding, and the assembly of latent attention.

use dropless_core::launch::Program;
use dropless_core::ops::{Mla, MlaGrad, MlaShape, Rotary};
use dropless_core::{Result, Tensor};

use super::{RowWise, elements};
use crate::dispatch::Stream;
use crate::shader::{Binding, F32, FLOAT, FORMATS, PRELUDE, ROTATE, Shader, U32, scalars, word};

scalars!(
    /// `elements`: pairs; `half`: pairs of a head; `table_rows`: positions in the tables.
    pub(crate) struct RotaryScalars { elements, columns, half, table_rows, inverse }
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
    /// Extents; `elements`: all queries; `table_rows`: positions in the tables.
    pub(crate) struct QueryScalars { elements, heads, nope, rope, table_rows, inverse }
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
    /// Extents; `elements`: what is written; `table_rows`: positions in the tables.
    pub(crate) struct KeyValueScalars { elements, heads, nope, rope, v, table_rows }
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

impl RowWise for Rotary<'_> {
    const SHADERS: &'static [&'static Program] = &[&ROTARY.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let pairs = self.x.len() / 2;
        let scalars = RotaryScalars {
            elements: word(pairs),
            columns: word(self.x.cols()),
            half: word(self.cos.cols()),
            table_rows: word(self.cos.rows()),
            inverse: u32::from(self.inverse),
        };
        let tensors = [Some(self.x), Some(self.positions), Some(self.cos), Some(self.sin), Some(self.out)];
        elements(stream, &ROTARY, &tensors, scalars, pairs)
    }
}

fn queries(shape: MlaShape, count: usize, cos: &Tensor, inverse: bool) -> QueryScalars {
    let MlaShape { heads, nope, rope, .. } = shape;
    let (table_rows, inverse) = (word(cos.rows()), u32::from(inverse));
    QueryScalars { elements: word(count), heads: word(heads), nope: word(nope), rope: word(rope), table_rows, inverse }
}

fn keys_and_values(shape: MlaShape, count: usize, cos: &Tensor) -> KeyValueScalars {
    let MlaShape { heads, nope, rope, v } = shape;
    let [heads, nope, rope, v] = [heads, nope, rope, v].map(word);
    KeyValueScalars { elements: word(count), heads, nope, rope, v, table_rows: word(cos.rows()) }
}

impl RowWise for Mla<'_> {
    const SHADERS: &'static [&'static Program] = &[&MLA_QUERY.program, &MLA_KEY_VALUE.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let [positions, cos, sin] = [Some(self.positions), Some(self.cos), Some(self.sin)];
        let count = self.q.len();
        let tensors = [Some(self.q_in), positions, cos, sin, Some(self.q)];
        elements(stream, &MLA_QUERY, &tensors, queries(self.shape, count, self.cos, false), count)?;
        let count = self.k.len() + self.v.len();
        let tensors = [Some(self.kv), Some(self.k_rope), positions, cos, sin, Some(self.k), Some(self.v)];
        elements(stream, &MLA_KEY_VALUE, &tensors, keys_and_values(self.shape, count, self.cos), count)
    }
}

impl RowWise for MlaGrad<'_> {
    const SHADERS: &'static [&'static Program] = &[&MLA_QUERY.program, &MLA_KEY_VALUE_GRAD.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let [positions, cos, sin] = [Some(self.positions), Some(self.cos), Some(self.sin)];
        let count = self.d_q.len();
        let tensors = [Some(self.d_q), positions, cos, sin, Some(self.d_q_in)];
        elements(stream, &MLA_QUERY, &tensors, queries(self.shape, count, self.cos, true), count)?;
        let count = self.d_kv.len() + self.d_k_rope.len();
        let tensors = [Some(self.d_k), Some(self.d_v), positions, cos, sin, Some(self.d_kv), Some(self.d_k_rope)];
        elements(stream, &MLA_KEY_VALUE_GRAD, &tensors, keys_and_values(self.shape, count, self.cos), count)
    }
}
