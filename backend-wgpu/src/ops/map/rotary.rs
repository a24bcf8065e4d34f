//! Rotary embedding, and the assembly of latent attention.

use dropless_core::launch::Program;
use dropless_core::ops::{Mla, MlaGrad, MlaShape, Pairs, Rotary};
use dropless_core::{Result, Tensor};

use super::{RowWise, elements};
use crate::dispatch::Stream;
use crate::shader::{Binding, F32, FLOAT, FORMATS, PRELUDE, ROTATE, Shader, U32, scalars, word};

scalars!(
    /// `elements`: columns that are copied and pairs; the other extents are those of a head, with `heads` of a token;
    /// `halves`: whether pairs are halves; `table_rows`: positions in the tables.
    pub(crate) struct RotaryScalars { elements, heads, nope, pairs, halves, table_rows, inverse }
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
    /// As [`RotaryScalars`], with the extent of a value.
    pub(crate) struct KeyValueScalars { elements, heads, nope, pairs, v, halves, table_rows }
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

fn halves(pairs: Pairs) -> u32 {
    u32::from(pairs == Pairs::Halves)
}

/// Rotates heads of some columns that are copied and `2 * cos.cols()` that are rotated.
#[derive(Clone, Copy)]
struct Rotation<'a> {
    x: &'a Tensor,
    tables: [&'a Tensor; 3],
    out: &'a Tensor,
    nope: usize,
    pairs: Pairs,
    inverse: bool,
}

impl Rotation<'_> {
    fn queue(self, stream: &Stream) -> Result<()> {
        let Rotation { x, tables: [positions, cos, sin], out, nope, pairs, inverse } = self;
        let heads = x.cols() / (nope + 2 * cos.cols());
        let count = x.rows() * heads * (nope + cos.cols());
        let scalars = RotaryScalars {
            elements: word(count),
            heads: word(heads),
            nope: word(nope),
            pairs: word(cos.cols()),
            halves: halves(pairs),
            table_rows: word(cos.rows()),
            inverse: u32::from(inverse),
        };
        elements(stream, &ROTARY, &[x, positions, cos, sin, out].map(Some), scalars, count)
    }
}

impl RowWise for Rotary<'_> {
    const SHADERS: &'static [&'static Program] = &[&ROTARY.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let &Rotary { x, positions, cos, sin, pairs, inverse, out } = self;
        Rotation { x, tables: [positions, cos, sin], out, nope: 0, pairs, inverse }.queue(stream)
    }
}

fn keys_and_values(shape: MlaShape, count: usize, cos: &Tensor) -> KeyValueScalars {
    let MlaShape { heads, nope, rope, v, pairs } = shape;
    KeyValueScalars {
        elements: word(count),
        heads: word(heads),
        nope: word(nope),
        pairs: word(rope / 2),
        v: word(v),
        halves: halves(pairs),
        table_rows: word(cos.rows()),
    }
}

impl RowWise for Mla<'_> {
    const SHADERS: &'static [&'static Program] = &[&ROTARY.program, &MLA_KEY_VALUE.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let tables = [self.positions, self.cos, self.sin];
        let MlaShape { heads, nope, rope, v, pairs } = self.shape;
        Rotation { x: self.q_in, tables, out: self.q, nope, pairs, inverse: false }.queue(stream)?;
        let count = self.q.rows() * heads * (nope + rope / 2 + v);
        let tensors = [self.kv, self.k_rope, self.positions, self.cos, self.sin, self.k, self.v].map(Some);
        elements(stream, &MLA_KEY_VALUE, &tensors, keys_and_values(self.shape, count, self.cos), count)
    }
}

impl RowWise for MlaGrad<'_> {
    const SHADERS: &'static [&'static Program] = &[&ROTARY.program, &MLA_KEY_VALUE_GRAD.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let tables = [self.positions, self.cos, self.sin];
        let MlaShape { heads, nope, rope, v, pairs } = self.shape;
        Rotation { x: self.d_q, tables, out: self.d_q_in, nope, pairs, inverse: true }.queue(stream)?;
        let count = self.d_q.rows() * (heads * (nope + v) + rope / 2);
        let tensors = [self.d_k, self.d_v, self.positions, self.cos, self.sin, self.d_kv, self.d_k_rope].map(Some);
        elements(stream, &MLA_KEY_VALUE_GRAD, &tensors, keys_and_values(self.shape, count, self.cos), count)
    }
}
