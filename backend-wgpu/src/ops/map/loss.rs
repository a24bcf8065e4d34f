//! Cross-entropy of the next token, with its gradient.

use dropless_core::Result;
use dropless_core::ops::CrossEntropy;

use super::workgroups;
use crate::dispatch::Stream;
use crate::shader::{Binding, F32, FLOAT, FORMATS, MATH, PRELUDE, ROW, Shader, U32, scalars, word};

scalars!(
    /// Tokens and vocabulary.
    pub(crate) struct CrossEntropyScalars { rows, columns }
);

pub(crate) static CROSS_ENTROPY: Shader<CrossEntropyScalars> = Shader::new(
    "cross_entropy",
    &[PRELUDE, FORMATS, MATH, ROW, include_str!("../../../../shaders/cross_entropy.wgsl")],
    &[
        Binding::read("logits", FLOAT),
        Binding::read("targets", U32),
        Binding::read("scale", F32),
        Binding::write("loss", F32),
        Binding::write("d_logits", FLOAT).optional(),
    ],
);

pub(super) fn cross_entropy(stream: &Stream, op: &CrossEntropy<'_>) -> Result<()> {
    let tokens = op.logits.rows();
    let scalars = CrossEntropyScalars { rows: word(tokens), columns: word(op.logits.cols()) };
    let tensors = [Some(op.logits), Some(op.targets), Some(op.scale), Some(op.loss), op.d_logits];
    workgroups(stream, &CROSS_ENTROPY, &tensors, scalars, tokens)
}
