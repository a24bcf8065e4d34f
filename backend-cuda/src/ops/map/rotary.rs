//! Rotary embedding, and the assembly of latent attention.

use std::sync::Arc;

use dropless_core::launch::Program;
use dropless_core::ops::{Mla, MlaGrad, MlaShape, Pairs, Rotary};
use dropless_core::{Result, Tensor};

use super::{RUN, RowWise, threads};
use crate::device::Gpu;
use crate::kernel::{Binding, F32, FLOAT, Kernel, PRELUDE, ROTATE, RUNS, U32, scalars, word};

scalars!(
    /// Extents; `nope`, `pairs`: columns of a head that are copied, and pairs that are rotated; `halves`: whether pairs
    /// are halves; `table_rows`: positions in the tables.
    pub(crate) struct RotaryScalars { tokens, heads, nope, pairs, halves, table_rows, inverse }
);

/// Reads and writes each element once; the tables come from the caches.
pub(crate) static ROTARY: Kernel<RotaryScalars> = Kernel::new(
    "rotary",
    &[PRELUDE, RUNS, ROTATE, include_str!("../../../../kernels/rotary.cu")],
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
    pub(crate) struct KeyValueScalars { tokens, heads, nope, pairs, v, halves, table_rows }
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

fn halves(pairs: Pairs) -> u32 {
    u32::from(pairs == Pairs::Halves)
}

/// Runs of a rotated part of `dim` columns, each with its pairs: `rotated_stretch` in `kernels/rotate.cuh`.
fn rotated_runs(dim: usize, pairs: Pairs) -> usize {
    let stretch = match pairs {
        Pairs::Neighbours => dim,
        Pairs::Halves => dim / 2,
    };
    stretch.div_ceil(RUN)
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
    fn queue(self, gpu: &Arc<Gpu>) -> Result<()> {
        let Rotation { x, tables: [positions, cos, sin], out, nope, pairs, inverse } = self;
        let (tokens, dim) = (x.rows(), 2 * cos.cols());
        let heads = x.cols() / (nope + dim);
        let scalars = RotaryScalars {
            tokens: word(tokens),
            heads: word(heads),
            nope: word(nope),
            pairs: word(cos.cols()),
            halves: halves(pairs),
            table_rows: word(cos.rows()),
            inverse: u32::from(inverse),
        };
        let count = tokens * heads * (nope.div_ceil(RUN) + rotated_runs(dim, pairs));
        threads(gpu, &ROTARY, &[x, positions, cos, sin, out].map(Some), scalars, count)
    }
}

impl RowWise for Rotary<'_> {
    const KERNELS: &'static [&'static Program] = &[&ROTARY.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let &Rotary { x, positions, cos, sin, pairs, inverse, out } = self;
        Rotation { x, tables: [positions, cos, sin], out, nope: 0, pairs, inverse }.queue(gpu)
    }
}

fn keys_and_values(shape: MlaShape, tokens: usize, table_rows: usize) -> KeyValueScalars {
    let MlaShape { heads, nope, rope, v, pairs } = shape;
    KeyValueScalars {
        tokens: word(tokens),
        heads: word(heads),
        nope: word(nope),
        pairs: word(rope / 2),
        v: word(v),
        halves: halves(pairs),
        table_rows: word(table_rows),
    }
}

impl RowWise for Mla<'_> {
    const KERNELS: &'static [&'static Program] = &[&ROTARY.program, &MLA_KEY_VALUE.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let tables = [self.positions, self.cos, self.sin];
        let MlaShape { heads, nope, rope, v, pairs } = self.shape;
        Rotation { x: self.q_in, tables, out: self.q, nope, pairs, inverse: false }.queue(gpu)?;
        let tokens = self.q.rows();
        let tensors = [self.kv, self.k_rope, self.positions, self.cos, self.sin, self.k, self.v].map(Some);
        let scalars = keys_and_values(self.shape, tokens, self.cos.rows());
        let runs = nope.div_ceil(RUN) + rotated_runs(rope, pairs) + v.div_ceil(RUN);
        threads(gpu, &MLA_KEY_VALUE, &tensors, scalars, tokens * heads * runs)
    }
}

impl RowWise for MlaGrad<'_> {
    const KERNELS: &'static [&'static Program] = &[&ROTARY.program, &MLA_KEY_VALUE_GRAD.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let tables = [self.positions, self.cos, self.sin];
        let MlaShape { heads, nope, rope, v, pairs } = self.shape;
        Rotation { x: self.d_q, tables, out: self.d_q_in, nope, pairs, inverse: true }.queue(gpu)?;
        let tokens = self.d_q.rows();
        let tensors = [self.d_k, self.d_v, self.positions, self.cos, self.sin, self.d_kv, self.d_k_rope].map(Some);
        let scalars = keys_and_values(self.shape, tokens, self.cos.rows());
        let runs = heads * (nope.div_ceil(RUN) + v.div_ceil(RUN)) + rotated_runs(rope, pairs);
        threads(gpu, &MLA_KEY_VALUE_GRAD, &tensors, scalars, tokens * runs)
    }
}
