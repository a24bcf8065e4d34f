//! The backward pass of a piece: the scores and the gradients of the probabilities, from them the factors of the three
//! gradients, and their products.

use dropless_core::ops::AttentionBackward;
use dropless_core::{DType, NumericModel, Result, Tensor};

use super::plan::{Piece, Plan, group, padded};
use super::{AttentionScalars, CHAINS, CONSTANTS, EXPONENT, PIECE, Pass, Product, VISIBLE, aligned, unit};
use crate::buffer;
use crate::dispatch::{Dispatch, Stream};
use crate::shader::{Binding, EX2, F32, FLOAT, FORMATS, MMA, OPERANDS, PRELUDE, ROW, Shader, U32, scalars, word};

scalars!(
    /// Heads of all rows, and elements of a head.
    pub(crate) struct DeltaScalars { rows, columns }
);

pub(crate) static DELTA: Shader<DeltaScalars> = Shader::new(
    "attention_delta",
    &[PRELUDE, FORMATS, ROW, include_str!("../../../../shaders/attention_delta.wgsl")],
    &[Binding::read("d_out", FLOAT), Binding::read("out", FLOAT), Binding::write("delta", F32)],
);

pub(crate) static DIFFERENTIATE: Shader<AttentionScalars> = Shader::new(
    "attention_differentiate",
    &[
        PRELUDE,
        FORMATS,
        EX2,
        PIECE,
        EXPONENT,
        VISIBLE,
        include_str!("../../../../shaders/attention_differentiate.wgsl"),
    ],
    &[
        Binding::read("start", U32).optional(),
        Binding::read("lse", F32),
        Binding::read("delta", F32),
        Binding::read("scores", F32),
        Binding::read("d_probabilities", F32),
        Binding::write("probabilities", FLOAT),
        Binding::write("slopes", FLOAT),
    ],
);

pub(crate) static KEYS: Shader<AttentionScalars> = Shader::new(
    "attention_keys",
    &[PRELUDE, FORMATS, MMA, OPERANDS, PIECE, VISIBLE, CHAINS, include_str!("../../../../shaders/attention_keys.wgsl")],
    &[
        Binding::read_units("a", FLOAT),
        Binding::read_units("b", FLOAT),
        Binding::read("start", U32).optional(),
        Binding::in_place("sums", F32).optional(),
        Binding::write("out", FLOAT),
    ],
)
.constants(CONSTANTS);

pub(super) fn run(scratch: usize, stream: &Stream, op: &AttentionBackward<'_>, model: NumericModel) -> Result<()> {
    let (shape, dtype) = (op.shape, op.q.dtype());
    // Scores, probabilities and the gradients of both; sums of keys and values that wait for the next piece.
    let plan = Plan::new(shape, 4, shape.qk_dim + shape.v_dim, scratch);
    let pass = Pass { stream, shape, start: op.start, dtype, unit: unit(dtype, model), plan };
    let delta = delta(stream, op)?;
    let [scores, d_probabilities] = [pass.score_scratch(DType::F32)?, pass.score_scratch(DType::F32)?];
    let [probabilities, slopes] = [pass.score_scratch(dtype)?, pass.score_scratch(dtype)?];
    let in_parts = group(shape) > 1 || plan.rows < shape.sequence;
    let sums = |dim: usize| in_parts.then(|| pass.scratch(DType::F32, shape.sequence * dim)).transpose();
    let (k_sums, v_sums) = (sums(shape.qk_dim)?, sums(shape.v_dim)?);
    for piece in plan.pieces(shape) {
        pass.scores(&piece, [op.q, op.k], shape.qk_dim, &scores)?;
        pass.scores(&piece, [op.d_out, op.v], shape.v_dim, &d_probabilities)?;

        let entries = piece.pairs.len() * padded(piece.rows.len()) * padded(piece.rows.end);
        let inputs = [op.start, Some(op.lse), Some(&delta), Some(&scores), Some(&d_probabilities)];
        let tensors = [&inputs[..], &[Some(&probabilities), Some(&slopes)]].concat();
        stream.dispatch(Dispatch::new(
            &DIFFERENTIATE,
            pass.exponent_scalars(&piece),
            &tensors,
            entries.div_ceil(64),
        ))?;

        pass.rows(&piece, [&slopes, op.k], shape.qk_dim, shape.scale, None, op.d_q)?;
        pass.keys(&piece, [&slopes, op.q], shape.qk_dim, shape.scale, k_sums.as_ref(), op.d_k)?;
        pass.keys(&piece, [&probabilities, op.d_out], shape.v_dim, 1.0, v_sums.as_ref(), op.d_v)?;
    }
    Ok(())
}

/// delta of each row and head.
fn delta(stream: &Stream, op: &AttentionBackward<'_>) -> Result<Tensor> {
    let delta = buffer::alloc(&stream.gpu, DType::F32, op.lse.shape())?;
    let rows = op.lse.len();
    let scalars = DeltaScalars { rows: word(rows), columns: word(op.shape.v_dim) };
    stream.dispatch(Dispatch::new(&DELTA, scalars, &[Some(op.d_out), Some(op.out), Some(&delta)], rows))?;
    Ok(delta)
}

impl Pass<'_> {
    /// The products of `a`, a number for each row and key, with the rows' heads of `dim` elements in `b`, times
    /// `scale`. `sums` holds the chains between the pieces if there are several.
    fn keys(
        &self,
        piece: &Piece,
        [a, b]: [&Tensor; 2],
        dim: usize,
        scale: f32,
        sums: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()> {
        let last = piece.member + 1 == group(self.shape) && piece.rows.end == self.shape.sequence;
        self.product(&Product {
            shader: &KEYS,
            tensors: &[Some(a), Some(b), self.start, sums, Some(out)],
            scalars: AttentionScalars {
                columns: word(dim),
                b_chain: word(b.cols()),
                scale: scale.to_bits(),
                continues: u32::from(piece.member > 0),
                complete: u32::from(last),
                ..self.scalars(piece)
            },
            chain_last: [true, false],
            aligned: [true, aligned(b, dim)],
            workgroups: piece.pairs.len() * self.tiles(padded(piece.rows.end)) * self.tiles(dim),
        })
    }
}
