//! Values of all ranks of a group.

use dropless_core::ops::AllToAll;
use dropless_core::{Backend, Group, Memory, Result, Tensor};

/// All members' values of one tensor, `[members, ...]`.
///
/// # Errors
/// Those of the exchange.
pub fn gather(backend: &dyn Backend, group: Group, x: &Tensor) -> Result<Tensor> {
    let mut shape = vec![backend.caps().size(group)];
    shape.extend(x.shape());
    let all = backend.alloc(x.dtype(), &shape, Memory::Device)?;
    AllToAll { group, send: x, recv: &all, counts: None }.run_in_order(backend)?;
    Ok(all)
}
