//! Cross-entropy of the next token, with its gradient.

use std::sync::Arc;

use dropless_core::Result;
use dropless_core::ops::CrossEntropy;

use super::RowWise;
use crate::device::{Gpu, word};
use crate::kernel::{Binding, F32, FLOAT, Kernel, Launch, PRELUDE, RUNS, U32, params};

params!(
    /// Vocabulary.
    Params { columns }
);

/// Reads the logits three times, twice if no gradient is asked for, and writes the gradient once.
pub(crate) static CROSS_ENTROPY: Kernel = Kernel {
    name: "cross_entropy",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/cross_entropy.cu")],
    params: Params::FIELDS,
    tensors: &[
        Binding::read("logits", FLOAT),
        Binding::read("targets", U32),
        Binding::read("scale", F32),
        Binding::write("loss", F32),
        Binding::write("d_logits", FLOAT).optional(),
    ],
    maps: 0,
    constants: &[],
};

impl RowWise for CrossEntropy<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&CROSS_ENTROPY];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        gpu.launch(Launch {
            kernel: &CROSS_ENTROPY,
            tensors: &[Some(self.logits), Some(self.targets), Some(self.scale), Some(self.loss), self.d_logits],
            constants: &[],
            params: Params { columns: word(self.logits.cols()) }.words(),
            maps: &[],
            blocks: self.logits.rows() as u64,
            threads: 256,
            shared: 0,
        })
    }
}
