//! Indices and counts that arrive in tensors, checked before anything is written.

use crate::error::{Error, Result, ensure};
use crate::host::memory;
use crate::ops::NONE;
use crate::tensor::Tensor;

/// Fails at the first index that is not below `bound`; `absent` says whether [`NONE`] may stand for no index.
pub(super) fn below(op: &'static str, field: &'static str, indices: &[u32], bound: usize, absent: bool) -> Result<()> {
    let fits = |i: u32| (i as usize) < bound || (absent && i == NONE);
    match indices.iter().position(|&i| !fits(i)) {
        None => Ok(()),
        Some(at) => Err(Error::Argument {
            op,
            field,
            expected: format!("indices below {bound}{}", if absent { " (or NONE)" } else { "" }),
            found: format!("{} at position {at}", indices[at]),
        }),
    }
}

/// The number of rows that count, at most `rows`.
pub(super) fn limit(op: &'static str, limit: Option<&Tensor>, rows: usize) -> Result<usize> {
    let Some(limit) = limit else { return Ok(rows) };
    let count = memory::input(op, limit)?.u32()[0] as usize;
    ensure(count <= rows, op, "limit", || format!("at most {rows}, the number of rows"), || count.to_string())?;
    Ok(count)
}
