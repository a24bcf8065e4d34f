//! Counts that arrive in tensors. NUMERICS.md, "Indices from the device".

use crate::error::Result;
use crate::host::memory;
use crate::tensor::Tensor;

/// The number of rows that count, at most `rows`.
pub(super) fn limit(op: &'static str, limit: Option<&Tensor>, rows: usize) -> Result<usize> {
    let Some(limit) = limit else { return Ok(rows) };
    Ok(rows.min(memory::input(op, limit)?.u32()[0] as usize))
}
