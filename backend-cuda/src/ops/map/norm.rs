//! RMSNorm and its gradient.

use std::sync::Arc;

use dropless_core::Result;
use dropless_core::launch::Program;
use dropless_core::ops::{RmsNorm, RmsNormGrad};

use super::reduce::{Blocks, Target};
use super::{RUN, Reads, RowWise, threads, warps};
use crate::device::Gpu;
use crate::kernel::{Binding, F32, FLOAT, Kernel, PRELUDE, RUNS, TOKEN_SUM, scalars, word};

scalars!(
    /// Extents; `eps`: the bits of an f32.
    pub(crate) struct RmsNormScalars { rows, columns, eps }
);

/// Reads x twice, the second time from a cache if its rows fit there, and writes the result once.
pub(crate) static RMS_NORM: Kernel<RmsNormScalars> = Kernel::new(
    "rms_norm",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/rms_norm.cu")],
    &[
        Binding::read("x", FLOAT),
        Binding::read("weight", F32),
        Binding::write("out", FLOAT),
        Binding::write("rstd", F32),
    ],
);

scalars!(
    /// Extents.
    pub(crate) struct RmsNormGradScalars { rows, columns }
);

/// Reads dy and x twice, the second time from a cache if their rows fit there, and the residual once; writes dx once.
pub(crate) static RMS_NORM_GRAD: Kernel<RmsNormGradScalars> = Kernel::new(
    "rms_norm_grad",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/rms_norm_grad.cu")],
    &[
        Binding::read("dy", FLOAT),
        Binding::read("x", FLOAT),
        Binding::read("weight", F32),
        Binding::read("rstd", F32),
        Binding::read("residual", FLOAT).optional(),
        Binding::write("dx", FLOAT),
    ],
);

scalars!(
    /// Extents; `blocks`: of 128 rows, those of all groups.
    pub(crate) struct RmsNormWeightScalars { blocks, columns, group_rows }
);

/// Reads dy and x once, and writes a sum for each column and 128 rows.
pub(crate) static RMS_NORM_GRAD_WEIGHT: Kernel<RmsNormWeightScalars> = Kernel::new(
    "rms_norm_grad_weight",
    &[PRELUDE, RUNS, TOKEN_SUM, include_str!("../../../../kernels/rms_norm_grad_weight.cu")],
    &[Binding::read("dy", FLOAT), Binding::read("x", FLOAT), Binding::read("rstd", F32), Binding::write("sums", F32)],
);

impl RowWise for RmsNorm<'_> {
    const KERNELS: &'static [&'static Program] = &[&RMS_NORM.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let count = self.x.rows();
        let scalars = RmsNormScalars { rows: word(count), columns: word(self.x.cols()), eps: self.eps.to_bits() };
        warps(
            gpu,
            &RMS_NORM,
            &[Some(self.x), Some(self.weight), Some(self.out), Some(self.rstd)],
            scalars,
            count,
            Reads::Twice,
        )
    }
}

impl RowWise for RmsNormGrad<'_> {
    const KERNELS: &'static [&'static Program] = &[&RMS_NORM_GRAD.program, &RMS_NORM_GRAD_WEIGHT.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let (count, columns) = (self.x.rows(), self.x.cols());
        let scalars = RmsNormGradScalars { rows: word(count), columns: word(columns) };
        let tensors = [Some(self.dy), Some(self.x), Some(self.weight), Some(self.rstd), self.residual, Some(self.dx)];
        warps(gpu, &RMS_NORM_GRAD, &tensors, scalars, count, Reads::Twice)?;

        let blocks = Blocks::new(count, columns, self.d_weight.rows());
        let sums = blocks.sums(gpu)?;
        let scalars = RmsNormWeightScalars {
            blocks: word(blocks.count()),
            columns: word(columns),
            group_rows: word(blocks.group_rows),
        };
        let tensors = [Some(self.dy), Some(self.x), Some(self.rstd), Some(&sums)];
        threads(gpu, &RMS_NORM_GRAD_WEIGHT, &tensors, scalars, blocks.count() * columns.div_ceil(RUN))?;
        blocks.total(gpu, &sums, self.d_weight, Target::AddedTo)
    }
}
