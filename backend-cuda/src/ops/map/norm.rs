//! RMSNorm and its gradient.

use std::sync::Arc;

use dropless_core::Result;
use dropless_core::ops::{RmsNorm, RmsNormGrad};

use super::reduce::{Blocks, Target};
use super::{RUN, Reads, RowWise, rows, threads};
use crate::device::{Gpu, word};
use crate::kernel::{Binding, F32, FLOAT, Kernel, PRELUDE, RUNS, TOKEN_SUM, params};

params!(
    /// Extents; `eps`: the bits of an f32.
    Params { rows, columns, eps }
);

/// Reads x twice, the second time from a cache if its rows fit there, and writes the result once.
pub(crate) static RMS_NORM: Kernel = Kernel {
    name: "rms_norm",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/rms_norm.cu")],
    params: Params::FIELDS,
    tensors: &[
        Binding::read("x", FLOAT),
        Binding::read("weight", F32),
        Binding::write("out", FLOAT),
        Binding::write("rstd", F32),
    ],
    maps: 0,
    constants: &[],
};

params!(
    /// Extents.
    GradParams { rows, columns }
);

/// Reads dy and x twice, the second time from a cache if their rows fit there, and the residual once; writes dx once.
pub(crate) static RMS_NORM_GRAD: Kernel = Kernel {
    name: "rms_norm_grad",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/rms_norm_grad.cu")],
    params: GradParams::FIELDS,
    tensors: &[
        Binding::read("dy", FLOAT),
        Binding::read("x", FLOAT),
        Binding::read("weight", F32),
        Binding::read("rstd", F32),
        Binding::read("residual", FLOAT).optional(),
        Binding::write("dx", FLOAT),
    ],
    maps: 0,
    constants: &[],
};

params!(
    /// Extents; `blocks`: of 128 rows, those of all groups.
    WeightParams { blocks, columns, group_rows }
);

/// Reads dy and x once, and writes a sum for each column and 128 rows.
pub(crate) static RMS_NORM_GRAD_WEIGHT: Kernel = Kernel {
    name: "rms_norm_grad_weight",
    files: &[PRELUDE, RUNS, TOKEN_SUM, include_str!("../../../../kernels/rms_norm_grad_weight.cu")],
    params: WeightParams::FIELDS,
    tensors: &[
        Binding::read("dy", FLOAT),
        Binding::read("x", FLOAT),
        Binding::read("rstd", F32),
        Binding::write("sums", F32),
    ],
    maps: 0,
    constants: &[],
};

impl RowWise for RmsNorm<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&RMS_NORM];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let count = self.x.rows();
        let params = Params { rows: word(count), columns: word(self.x.cols()), eps: self.eps.to_bits() };
        rows(
            gpu,
            &RMS_NORM,
            &[Some(self.x), Some(self.weight), Some(self.out), Some(self.rstd)],
            params.words(),
            count,
            Reads::Twice,
        )
    }
}

impl RowWise for RmsNormGrad<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&RMS_NORM_GRAD, &RMS_NORM_GRAD_WEIGHT];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let (count, columns) = (self.x.rows(), self.x.cols());
        let params = GradParams { rows: word(count), columns: word(columns) };
        let tensors = [Some(self.dy), Some(self.x), Some(self.weight), Some(self.rstd), self.residual, Some(self.dx)];
        rows(gpu, &RMS_NORM_GRAD, &tensors, params.words(), count, Reads::Twice)?;

        let blocks = Blocks::new(count, columns, self.d_weight.rows());
        let sums = blocks.sums(gpu)?;
        let params =
            WeightParams { blocks: word(blocks.count()), columns: word(columns), group_rows: word(blocks.group_rows) };
        let tensors = [Some(self.dy), Some(self.x), Some(self.rstd), Some(&sums)];
        threads(gpu, &RMS_NORM_GRAD_WEIGHT, &tensors, params.words(), blocks.count() * columns.div_ceil(RUN))?;
        blocks.total(gpu, &sums, self.d_weight, Target::AddedTo)
    }
}
