//! The forward pass of a piece: scores, their online softmax, and the product with the values.

use dropless_core::ops::{AttentionForward, KEY_TILE};
use dropless_core::{DType, NumericModel, Result};

use super::plan::{Plan, padded};
use super::{AttentionScalars, EXPONENT, PIECE, Pass, Softmax, VISIBLE, unit};
use crate::dispatch::{Dispatch, Stream};
use crate::shader::{Binding, EX2, F32, FLOAT, FORMATS, MATH, PRELUDE, Shader, U32};

pub(crate) static SOFTMAX: Shader<AttentionScalars> = Shader::new(
    "attention_softmax",
    &[
        PRELUDE,
        FORMATS,
        MATH,
        EX2,
        PIECE,
        EXPONENT,
        VISIBLE,
        include_str!("../../../../shaders/attention_softmax.wgsl"),
    ],
    &[
        Binding::read("start", U32).optional(),
        Binding::read("scores", F32),
        Binding::write("probabilities", FLOAT),
        Binding::write("alpha", F32),
        Binding::write("reciprocals", F32),
        Binding::write("lse", F32),
    ],
);

pub(super) fn run(scratch: usize, stream: &Stream, op: &AttentionForward<'_>, model: NumericModel) -> Result<()> {
    let (shape, dtype) = (op.shape, op.q.dtype());
    // Scores and probabilities.
    let plan = Plan::new(shape, 2, 0, scratch);
    let pass = Pass { stream, shape, start: op.start, dtype, unit: unit(dtype, model), plan };
    let (scores, probabilities) = (pass.score_scratch(DType::F32)?, pass.score_scratch(pass.dtype)?);
    let alpha = pass.scratch(DType::F32, plan.rows * shape.sequence.div_ceil(KEY_TILE))?;
    let reciprocals = pass.scratch(DType::F32, plan.rows)?;
    for piece in plan.pieces(shape) {
        pass.scores(&piece, [op.q, op.k], shape.qk_dim, &scores)?;

        let scalars = pass.exponent_scalars(&piece);
        let (pairs, rows) = (piece.pairs.len(), padded(piece.rows.len()));
        let tensors = [op.start, Some(&scores), Some(&probabilities), Some(&alpha), Some(&reciprocals), Some(op.lse)];
        stream.dispatch(Dispatch::new(&SOFTMAX, scalars, &tensors, (pairs * rows).div_ceil(64)))?;

        let softmax = Some(Softmax { alpha: &alpha, reciprocals: &reciprocals });
        pass.rows(&piece, [&probabilities, op.v], shape.v_dim, 1.0, softmax, op.out)?;
    }
    Ok(())
}
