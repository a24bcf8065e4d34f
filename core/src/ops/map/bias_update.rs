//! Balancing of the experts without a loss, by a bias of the selection. NUMERICS.md, "Routing".

use std::cmp::Ordering;

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, Values, distinct, number};
use crate::tensor::Tensor;

/// Aux-loss-free balancing (arXiv 2408.15664): `bias += rate * sign(mean - count)`, in place.
///
/// # Shape
/// counts: u32 `[parts, experts]`, added over the parts (the ranks); bias: f32 `[experts]`.
///
/// # Numerics
/// The comparison is exact: `count * experts` against the total, in 64-bit integers. An equal count changes nothing.
#[derive(Clone, Copy, Debug)]
pub struct BiasUpdate<'a> {
    /// Choices of each expert in this step.
    pub counts: &'a Tensor,
    /// Step of the bias.
    pub rate: f32,
    /// The bias, updated.
    pub bias: &'a Tensor,
}

op!(BiasUpdate: read(counts), update(bias), value(rate));

impl BiasUpdate<'_> {
    pub(crate) const OP: &'static str = "bias_update";

    pub(super) fn check(&self) -> Result<()> {
        let experts = self.bias.len();
        Arg::new(Self::OP, "bias", self.bias).dtype(&[DType::F32])?;
        Arg::new(Self::OP, "counts", self.counts).dtype(&[DType::U32])?;
        number(
            Self::OP,
            "counts",
            self.counts.cols() == experts,
            &format!("{experts} columns, one for each expert"),
            self.counts.cols(),
        )?;
        distinct(Self::OP, "bias", self.bias, &[self.counts])
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (counts, mut bias) = (Values::read(memory, self.counts)?.words(), Values::read(memory, self.bias)?);
        let experts = bias.len();
        let total: u64 = counts.iter().map(|&count| u64::from(count)).sum();
        for e in 0..experts {
            let count: u64 = counts.iter().skip(e).step_by(experts).map(|&count| u64::from(count)).sum();
            match (count * experts as u64).cmp(&total) {
                Ordering::Less => bias.set_float(e, bias.float(e) + self.rate),
                Ordering::Equal => {}
                Ordering::Greater => bias.set_float(e, bias.float(e) - self.rate),
            }
        }
        bias.write(memory)
    }
}
