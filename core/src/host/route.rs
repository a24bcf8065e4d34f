use crate::error::Result;
use crate::ops::{Checked, Route};
pub(super) fn run(_op: &Checked<Route<'_>>, _ranks: usize) -> Result<()> {
    Ok(())
}
