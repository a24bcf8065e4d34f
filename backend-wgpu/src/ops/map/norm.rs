//! RMSNorm and its gradient.

use dropless_core::Result;
use dropless_core::launch::Program;
use dropless_core::ops::{RmsNorm, RmsNormGrad};

use super::{RowWise, elements, workgroups};
use crate::dispatch::Stream;
use crate::shader::{Binding, F32, FLOAT, FORMATS, PRELUDE, ROW, Shader, scalars, word};

scalars!(
    /// Extents; `eps`: the bits of an f32.
    pub(crate) struct RmsNormScalars { rows, columns, eps }
);

pub(crate) static RMS_NORM: Shader<RmsNormScalars> = Shader::new(
    "rms_norm",
    &[PRELUDE, FORMATS, ROW, include_str!("../../../../shaders/rms_norm.wgsl")],
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

pub(crate) static RMS_NORM_GRAD: Shader<RmsNormGradScalars> = Shader::new(
    "rms_norm_grad",
    &[PRELUDE, FORMATS, ROW, include_str!("../../../../shaders/rms_norm_grad.wgsl")],
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
    /// Extents; `elements`: groups times columns.
    pub(crate) struct RmsNormWeightScalars { elements, columns, group_rows }
);

pub(crate) static RMS_NORM_GRAD_WEIGHT: Shader<RmsNormWeightScalars> = Shader::new(
    "rms_norm_grad_weight",
    &[PRELUDE, FORMATS, include_str!("../../../../shaders/rms_norm_grad_weight.wgsl")],
    &[
        Binding::read("dy", FLOAT),
        Binding::read("x", FLOAT),
        Binding::read("rstd", F32),
        Binding::in_place("d_weight", F32),
    ],
);

impl RowWise for RmsNorm<'_> {
    const SHADERS: &'static [&'static Program] = &[&RMS_NORM.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.x.rows();
        let scalars = RmsNormScalars { rows: word(count), columns: word(self.x.cols()), eps: self.eps.to_bits() };
        workgroups(
            stream,
            &RMS_NORM,
            &[Some(self.x), Some(self.weight), Some(self.out), Some(self.rstd)],
            scalars,
            count,
        )
    }
}

impl RowWise for RmsNormGrad<'_> {
    const SHADERS: &'static [&'static Program] = &[&RMS_NORM_GRAD.program, &RMS_NORM_GRAD_WEIGHT.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let (count, columns, groups) = (self.x.rows(), self.x.cols(), self.d_weight.rows());
        let scalars = RmsNormGradScalars { rows: word(count), columns: word(columns) };
        let tensors = [Some(self.dy), Some(self.x), Some(self.weight), Some(self.rstd), self.residual, Some(self.dx)];
        workgroups(stream, &RMS_NORM_GRAD, &tensors, scalars, count)?;
        let sums = groups * columns;
        let scalars =
            RmsNormWeightScalars { elements: word(sums), columns: word(columns), group_rows: word(count / groups) };
        let tensors = [Some(self.dy), Some(self.x), Some(self.rstd), Some(self.d_weight)];
        elements(stream, &RMS_NORM_GRAD_WEIGHT, &tensors, scalars, sums)
    }
}
