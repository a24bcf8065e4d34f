//! The embedding table.

use dropless_core::ops::{EmbeddingGrad, GatherRows};
use dropless_core::{Backend, DType, Result, Tensor};

use crate::context::alloc;
use crate::nn::Weight;

/// A row for each token id, `[1, vocabulary, h]`.
#[derive(Debug)]
pub(crate) struct Embedding {
    pub(crate) table: Weight,
    /// Element type of activations.
    pub(crate) element: DType,
}

impl Embedding {
    /// The rows of u32 ids, `[ids, h]`.
    pub(crate) fn forward(&self, backend: &dyn Backend, ids: &Tensor) -> Result<Tensor> {
        let table = self.table.value.index(0)?;
        let out = alloc(backend, self.element, &[ids.len(), table.cols()])?;
        GatherRows { x: &table, index: ids, out: &out }.run(backend)?;
        Ok(out)
    }

    /// Adds the gradient `dy` of the rows of `ids` to the table's.
    pub(crate) fn backward(&self, backend: &dyn Backend, ids: &Tensor, dy: &Tensor) -> Result<()> {
        EmbeddingGrad { dy, ids, d_table: self.table.grad()? }.run(backend)
    }
}
