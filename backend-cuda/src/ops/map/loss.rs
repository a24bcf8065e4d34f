//! Cross-entropy of the next token, with its gradient.

use std::sync::Arc;

use dropless_core::Result;
use dropless_core::launch::Program;
use dropless_core::ops::CrossEntropy;

use super::RowWise;
use crate::device::Gpu;
use crate::kernel::{Binding, F32, FLOAT, Kernel, Launch, PRELUDE, RUNS, U32, scalars, word};

scalars!(
    /// Vocabulary.
    pub(crate) struct CrossEntropyScalars { columns }
);

/// Reads the logits three times, twice if no gradient is asked for, and writes the gradient once.
pub(crate) static CROSS_ENTROPY: Kernel<CrossEntropyScalars> = Kernel::new(
    "cross_entropy",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/cross_entropy.cu")],
    &[
        Binding::read("logits", FLOAT),
        Binding::read("targets", U32),
        Binding::read("scale", F32),
        Binding::write("loss", F32),
        Binding::write("d_logits", FLOAT).optional(),
    ],
);

impl RowWise for CrossEntropy<'_> {
    const KERNELS: &'static [&'static Program] = &[&CROSS_ENTROPY.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let scalars = CrossEntropyScalars { columns: word(self.logits.cols()) };
        let tensors = [Some(self.logits), Some(self.targets), Some(self.scale), Some(self.loss), self.d_logits];
        gpu.launch(Launch::new(&CROSS_ENTROPY, scalars, &tensors, self.logits.rows(), 256))
    }
}
