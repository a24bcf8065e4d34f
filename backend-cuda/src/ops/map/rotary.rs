//! Rotary embedding, and the assembly of latent attention.

use std::sync::Arc;

use dropless_core::Result;
use dropless_core::launch::Program;
use dropless_core::ops::{Mla, MlaGrad, MlaShape, Rotary};

use super::{RUN, RowWise, threads};
use crate::device::Gpu;
use crate::kernel::{Binding, F32, FLOAT, Kernel, PRELUDE, ROTATE, RUNS, U32, scalars, word};

scalars!(
    /// Extents; `half`: pairs of a head; `table_rows`: positions in the tables.
    pub(crate) struct RotaryScalars { tokens, heads, half, table_rows, inverse }
);

/// Rows that are rotated by tables.
const ROTATED: &[Binding] = &[
    Binding::read("x", FLOAT),
    Binding::read("positions", U32),
    Binding::read("cos", F32),
    Binding::read("sin", F32),
    Binding::write("out", FLOAT),
];

/// Reads and writes each element once; the tables come from the caches.
pub(crate) static ROTARY: Kernel<RotaryScalars> =
    Kernel::new("rotary", &[PRELUDE, RUNS, ROTATE, include_str!("../../../../kernels/rotary.cu")], ROTATED);

scalars!(
    /// Extents; `table_rows`: positions in the tables.
    pub(crate) struct QueryScalars { tokens, heads, nope, rope, table_rows, inverse }
);

/// Reads and writes each element once; the tables come from the caches.
pub(crate) static MLA_QUERY: Kernel<QueryScalars> =
    Kernel::new("mla_query", &[PRELUDE, RUNS, ROTATE, include_str!("../../../../kernels/mla_query.cu")], ROTATED);

scalars!(
    /// Extents; `table_rows`: positions in the tables.
    pub(crate) struct KeyValueScalars { tokens, heads, nope, rope, v, table_rows }
);

/// Reads the joint keys and values and writes keys and values once; the shared key is rotated anew for each head.
pub(crate) static MLA_KEY_VALUE: Kernel<KeyValueScalars> = Kernel::new(
    "mla_key_value",
    &[PRELUDE, RUNS, ROTATE, include_str!("../../../../kernels/mla_key_value.cu")],
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

/// Reads and writes each element once.
pub(crate) static MLA_KEY_VALUE_GRAD: Kernel<KeyValueScalars> = Kernel::new(
    "mla_key_value_grad",
    &[PRELUDE, RUNS, ROTATE, include_str!("../../../../kernels/mla_key_value_grad.cu")],
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
    const KERNELS: &'static [&'static Program] = &[&ROTARY.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let (tokens, half) = (self.x.rows(), self.cos.cols());
        let heads = self.x.cols() / (2 * half);
        let scalars = RotaryScalars {
            tokens: word(tokens),
            heads: word(heads),
            half: word(half),
            table_rows: word(self.cos.rows()),
            inverse: u32::from(self.inverse),
        };
        let tensors = [Some(self.x), Some(self.positions), Some(self.cos), Some(self.sin), Some(self.out)];
        threads(gpu, &ROTARY, &tensors, scalars, tokens * heads * half.div_ceil(RUN))
    }
}

fn queries(shape: MlaShape, tokens: usize, table_rows: usize, inverse: bool) -> QueryScalars {
    let MlaShape { heads, nope, rope, .. } = shape;
    QueryScalars {
        tokens: word(tokens),
        heads: word(heads),
        nope: word(nope),
        rope: word(rope),
        table_rows: word(table_rows),
        inverse: u32::from(inverse),
    }
}

fn keys_and_values(shape: MlaShape, tokens: usize, table_rows: usize) -> KeyValueScalars {
    let MlaShape { heads, nope, rope, v } = shape;
    KeyValueScalars {
        tokens: word(tokens),
        heads: word(heads),
        nope: word(nope),
        rope: word(rope),
        v: word(v),
        table_rows: word(table_rows),
    }
}

impl RowWise for Mla<'_> {
    const KERNELS: &'static [&'static Program] = &[&MLA_QUERY.program, &MLA_KEY_VALUE.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let [positions, cos, sin] = [Some(self.positions), Some(self.cos), Some(self.sin)];
        let (tokens, table_rows) = (self.q.rows(), self.cos.rows());
        let MlaShape { heads, nope, rope, v } = self.shape;
        let [nope, rope, v] = [nope, rope, v].map(|columns| columns.div_ceil(RUN));
        let tensors = [Some(self.q_in), positions, cos, sin, Some(self.q)];
        let scalars = queries(self.shape, tokens, table_rows, false);
        threads(gpu, &MLA_QUERY, &tensors, scalars, tokens * heads * (nope + rope))?;
        let tensors = [Some(self.kv), Some(self.k_rope), positions, cos, sin, Some(self.k), Some(self.v)];
        let scalars = keys_and_values(self.shape, tokens, table_rows);
        threads(gpu, &MLA_KEY_VALUE, &tensors, scalars, tokens * heads * (nope + rope + v))
    }
}

impl RowWise for MlaGrad<'_> {
    const KERNELS: &'static [&'static Program] = &[&MLA_QUERY.program, &MLA_KEY_VALUE_GRAD.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let [positions, cos, sin] = [Some(self.positions), Some(self.cos), Some(self.sin)];
        let (tokens, table_rows) = (self.d_q.rows(), self.cos.rows());
        let MlaShape { heads, nope, rope, v } = self.shape;
        let [nope, rope, v] = [nope, rope, v].map(|columns| columns.div_ceil(RUN));
        let tensors = [Some(self.d_q), positions, cos, sin, Some(self.d_q_in)];
        let scalars = queries(self.shape, tokens, table_rows, true);
        threads(gpu, &MLA_QUERY, &tensors, scalars, tokens * heads * (nope + rope))?;
        let tensors = [Some(self.d_k), Some(self.d_v), positions, cos, sin, Some(self.d_kv), Some(self.d_k_rope)];
        let scalars = keys_and_values(self.shape, tokens, table_rows);
        threads(gpu, &MLA_KEY_VALUE_GRAD, &tensors, scalars, tokens * (heads * (nope + v) + rope))
    }
}
