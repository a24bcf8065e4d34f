//! Cross-entropy of the next token, with its gradient.

use std::sync::Arc;

use dropless_core::Result;
use dropless_core::ops::CrossEntropy;

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

pub(super) fn cross_entropy(gpu: &Arc<Gpu>, op: &CrossEntropy<'_>) -> Result<()> {
    let scalars = CrossEntropyScalars { columns: word(op.logits.cols()) };
    let tensors = [Some(op.logits), Some(op.targets), Some(op.scale), Some(op.loss), op.d_logits];
    gpu.launch(Launch::new(&CROSS_ENTROPY, scalars, &tensors, op.logits.rows(), 256))
}
