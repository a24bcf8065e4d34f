//! Attention piece by piece: scores in scratch memory, and one shader for each step of the rule. NUMERICS.md,
//! "Attention"; shaders/attention_piece.wgsl says how a piece lies in memory.
//!
//! Besides its tensors an op takes up to 128 MiB for scores, or what 64 rows of one head need where that is more, and a
//! few numbers a row. The device frees it when it is done with the op.

pub(crate) mod backward;
pub(crate) mod forward;
mod plan;

use dropless_core::numerics::mma::Tensorcore;
use dropless_core::ops::{Attention, AttentionShape, Checked};
use dropless_core::{DType, NumericModel, Result, Tensor};

use super::chains::{Chains, SIDE, aligned, tile};

use self::plan::{Piece, Plan, SCRATCH, group, padded};
use crate::buffer;
use crate::dispatch::{Dispatch, Stream};
use crate::shader::{Binding, F32, FLOAT, FORMATS, MMA, OPERANDS, PRELUDE, Shader, U32, scalars, word};

/// The files that the shaders share.
const PIECE: &str = include_str!("../../../../shaders/attention_piece.wgsl");
const EXPONENT: &str = include_str!("../../../../shaders/attention_exponent.wgsl");
const VISIBLE: &str = include_str!("../../../../shaders/attention_visible.wgsl");
const CHAINS: &str = include_str!("../../../../shaders/attention_chains.wgsl");

/// Constants of every product.
const CONSTANTS: &[&str] = &[
    "TILE",
    "PAIRS",
    "STEP",
    "FRACTION_BITS",
    "RESULT_BITS",
    "MODEL",
    "UNIT",
    "A_CHAIN_LAST",
    "B_CHAIN_LAST",
    "A_UNITS",
    "B_UNITS",
];

scalars!(
    /// A piece, and the operands of one dispatch. `pair` to `keys`: see attention_piece.wgsl; `columns`: elements of a
    /// head; `a_chain`, `b_chain`: elements from one term of a chain to the next; `scale`: the bits of the factor of a
    /// result, or of the exponents; `continues`, `complete`: see attention_keys.wgsl.
    pub(crate) struct AttentionScalars {
        pair,
        pairs,
        kv_heads,
        group,
        member,
        sequence,
        row,
        width,
        keys,
        columns,
        a_chain,
        b_chain,
        scale,
        continues,
        complete,
    }
);

pub(crate) static SCORES: Shader<AttentionScalars> = Shader::new(
    "attention_scores",
    &[PRELUDE, MMA, OPERANDS, PIECE, VISIBLE, CHAINS, include_str!("../../../../shaders/attention_scores.wgsl")],
    &[
        Binding::read_units("a", FLOAT),
        Binding::read_units("b", FLOAT),
        Binding::read("start", U32).optional(),
        Binding::write("scores", F32),
    ],
)
.constants(CONSTANTS);

pub(crate) static ROWS: Shader<AttentionScalars> = Shader::new(
    "attention_rows",
    &[PRELUDE, FORMATS, MMA, OPERANDS, PIECE, VISIBLE, CHAINS, include_str!("../../../../shaders/attention_rows.wgsl")],
    &[
        Binding::read_units("a", FLOAT),
        Binding::read_units("b", FLOAT),
        Binding::read("start", U32).optional(),
        Binding::read("alpha", F32).optional(),
        Binding::read("reciprocals", F32).optional(),
        Binding::write("out", FLOAT),
    ],
)
.constants(CONSTANTS);

/// What every dispatch of one op needs.
#[derive(Debug)]
struct Pass<'a> {
    stream: &'a Stream,
    shape: AttentionShape,
    start: Option<&'a Tensor>,
    /// Of the operands.
    dtype: DType,
    /// None: chains of f32 fma.
    unit: Option<Tensorcore>,
    plan: Plan,
}

/// A product: its shader, the tensors, and how they lie in memory.
#[derive(Debug)]
struct Product<'a> {
    shader: &'static Shader<AttentionScalars>,
    tensors: &'a [Option<&'a Tensor>],
    scalars: AttentionScalars,
    /// As in [`Chains`].
    chain_last: [bool; 2],
    aligned: [bool; 2],
    workgroups: usize,
}

pub(crate) fn run(stream: &Stream, op: &Checked<Attention<'_>>, model: NumericModel) -> Result<()> {
    run_within(SCRATCH, stream, op, model)
}

fn run_within(scratch: usize, stream: &Stream, op: &Checked<Attention<'_>>, model: NumericModel) -> Result<()> {
    match &**op {
        Attention::Forward(op) => forward::run(scratch, stream, op, model),
        Attention::Backward(op) => backward::run(scratch, stream, op, model),
    }
}

impl Pass<'_> {
    /// Scratch memory of `len` elements for each pair of a piece.
    fn scratch(&self, dtype: DType, len: usize) -> Result<Tensor> {
        buffer::alloc(&self.stream.gpu, dtype, &[self.plan.pairs, len])
    }

    /// Scratch memory for one number of each row and key of a piece.
    fn score_scratch(&self, dtype: DType) -> Result<Tensor> {
        self.scratch(dtype, padded(self.shape.sequence) * self.plan.rows)
    }

    /// What the shaders know of a piece.
    fn scalars(&self, piece: &Piece) -> AttentionScalars {
        AttentionScalars {
            pair: word(piece.pairs.start),
            pairs: word(piece.pairs.len()),
            kv_heads: word(self.shape.kv_heads),
            group: word(group(self.shape)),
            member: word(piece.member),
            sequence: word(self.shape.sequence),
            row: word(piece.rows.start),
            width: word(padded(piece.rows.len())),
            keys: word(padded(piece.rows.end)),
            columns: 0,
            a_chain: 1,
            b_chain: 1,
            scale: 1.0f32.to_bits(),
            continues: 0,
            complete: 1,
        }
    }

    /// The same for what turns scores into probabilities.
    fn exponent_scalars(&self, piece: &Piece) -> AttentionScalars {
        AttentionScalars { scale: self.shape.exponent_factor().to_bits(), ..self.scalars(piece) }
    }

    /// Workgroups along an extent of outputs.
    fn tiles(&self, extent: usize) -> usize {
        extent.div_ceil(SIDE * tile(self.unit))
    }

    fn product(&self, product: &Product<'_>) -> Result<()> {
        let Product { chain_last, aligned, .. } = *product;
        let chains = Chains { dtype: self.dtype, unit: self.unit, tile: tile(self.unit), chain_last, aligned };
        let Product { shader, scalars, tensors, workgroups, .. } = *product;
        let constants = &chains.constants();
        self.stream.dispatch(Dispatch { constants, ..Dispatch::new(shader, scalars, tensors, workgroups) })
    }

    /// The products of the piece's queries in `a` and its keys in `b` along heads of `dim` elements.
    fn scores(&self, piece: &Piece, [a, b]: [&Tensor; 2], dim: usize, out: &Tensor) -> Result<()> {
        let tiles = self.tiles(padded(piece.rows.len())) * self.tiles(padded(piece.rows.end));
        self.product(&Product {
            shader: &SCORES,
            tensors: &[Some(a), Some(b), self.start, Some(out)],
            scalars: AttentionScalars { columns: word(dim), ..self.scalars(piece) },
            chain_last: [true, true],
            aligned: [a, b].map(|operand| aligned(operand, dim)),
            workgroups: piece.pairs.len() * tiles,
        })
    }

    /// The products of `a`, a number for each row and key, with the keys' heads of `dim` elements in `b`, times
    /// `scale`.
    fn rows(
        &self,
        piece: &Piece,
        [a, b]: [&Tensor; 2],
        dim: usize,
        scale: f32,
        softmax: Option<Softmax<'_>>,
        out: &Tensor,
    ) -> Result<()> {
        let scalars = self.scalars(piece);
        let (alpha, reciprocals) = softmax.map(|Softmax { alpha, reciprocals }| (alpha, reciprocals)).unzip();
        self.product(&Product {
            shader: &ROWS,
            tensors: &[Some(a), Some(b), self.start, alpha, reciprocals, Some(out)],
            scalars: AttentionScalars {
                columns: word(dim),
                a_chain: scalars.width,
                b_chain: word(b.cols()),
                scale: scale.to_bits(),
                ..scalars
            },
            chain_last: [false, false],
            aligned: [true, aligned(b, dim)],
            workgroups: piece.pairs.len() * self.tiles(padded(piece.rows.len())) * self.tiles(dim),
        })
    }
}

/// What the online softmax keeps of each tile of keys and row, and of each row.
#[derive(Clone, Copy, Debug)]
struct Softmax<'a> {
    alpha: &'a Tensor,
    reciprocals: &'a Tensor,
}

/// The matrix unit that multiplies elements of this type.
fn unit(dtype: DType, model: NumericModel) -> Option<Tensorcore> {
    if dtype == DType::Bf16 { Tensorcore::of_bf16(model) } else { None }
}

#[cfg(test)]
mod tests;
