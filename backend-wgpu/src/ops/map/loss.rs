//! Cross-entropy of the next token, with its gradient.

use dropless_core::Result;
use dropless_core::ops::CrossEntropy;

use super::{RowWise, rows};
use crate::dispatch::{Stream, word};
use crate::shader::{Binding, F32, FLOAT, FORMATS, MATH, PRELUDE, ROW, Shader, U32, params};

params!(
    /// Tokens and vocabulary.
    Params { rows, columns }
);

pub(crate) static CROSS_ENTROPY: Shader = Shader {
    name: "cross_entropy",
    files: &[PRELUDE, FORMATS, MATH, ROW, include_str!("../../../../shaders/cross_entropy.wgsl")],
    params: Params::FIELDS,
    bindings: &[
        Binding::read("logits", FLOAT),
        Binding::read("targets", U32),
        Binding::read("scale", F32),
        Binding::write("loss", F32),
        Binding::write("d_logits", FLOAT).optional(),
    ],
    constants: &[],
};

impl RowWise for CrossEntropy<'_> {
    const SHADERS: &'static [&'static Shader] = &[&CROSS_ENTROPY];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let tokens = self.logits.rows();
        let params = Params { rows: word(tokens), columns: word(self.logits.cols()) };
        let tensors = [Some(self.logits), Some(self.targets), Some(self.scale), Some(self.loss), self.d_logits];
        rows(stream, &CROSS_ENTROPY, &tensors, params.words(), tokens)
    }
}
