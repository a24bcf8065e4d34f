//! Cross-entropy of the next token, with its gradient.

use dropless_core::Result;
use dropless_core::launch::Program;
use dropless_core::ops::CrossEntropy;

use super::{RowWise, workgroups};
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

impl RowWise for CrossEntropy<'_> {
    const SHADERS: &'static [&'static Program] = &[&CROSS_ENTROPY.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let tokens = self.logits.rows();
        let scalars = CrossEntropyScalars { rows: word(tokens), columns: word(self.logits.cols()) };
        let tensors = [Some(self.logits), Some(self.targets), Some(self.scale), Some(self.loss), self.d_logits];
        workgroups(stream, &CROSS_ENTROPY, &tensors, scalars, tokens)
    }
}
