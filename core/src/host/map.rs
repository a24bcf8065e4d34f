use crate::error::Result;
use crate::ops::{Checked, Map};
pub(super) fn run(_op: &Checked<Map<'_>>) -> Result<()> {
    Ok(())
}
