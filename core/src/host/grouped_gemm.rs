use super::Simd;
use crate::error::Result;
use crate::numerics::NumericModel;
use crate::ops::{Checked, GroupedGemm};
pub(super) fn run(_op: &Checked<GroupedGemm<'_>>, _model: NumericModel, _simd: Simd) -> Result<()> {
    Ok(())
}
