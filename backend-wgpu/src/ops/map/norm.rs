//! RMSNorm and its gradient.

use dropless_core::Result;
use dropless_core::ops::{RmsNorm, RmsNormGrad};

use super::{RowWise, elements, rows};
use crate::dispatch::{Stream, word};
use crate::shader::{Binding, F32, FLOAT, FORMATS, PRELUDE, ROW, Shader, params};

params!(
    /// Extents; `eps`: the bits of an f32.
    Params { rows, columns, eps }
);

pub(crate) static RMS_NORM: Shader = Shader {
    name: "rms_norm",
    files: &[PRELUDE, FORMATS, ROW, include_str!("../../../../shaders/rms_norm.wgsl")],
    params: Params::FIELDS,
    bindings: &[
        Binding::read("x", FLOAT),
        Binding::read("weight", F32),
        Binding::write("out", FLOAT),
        Binding::write("rstd", F32),
    ],
    constants: &[],
};

params!(
    /// Extents.
    GradParams { rows, columns }
);

pub(crate) static RMS_NORM_GRAD: Shader = Shader {
    name: "rms_norm_grad",
    files: &[PRELUDE, FORMATS, ROW, include_str!("../../../../shaders/rms_norm_grad.wgsl")],
    params: GradParams::FIELDS,
    bindings: &[
        Binding::read("dy", FLOAT),
        Binding::read("x", FLOAT),
        Binding::read("weight", F32),
        Binding::read("rstd", F32),
        Binding::read("residual", FLOAT).optional(),
        Binding::write("dx", FLOAT),
    ],
    constants: &[],
};

params!(
    /// Extents; `elements`: groups times columns.
    WeightParams { elements, columns, group_rows }
);

pub(crate) static RMS_NORM_GRAD_WEIGHT: Shader = Shader {
    name: "rms_norm_grad_weight",
    files: &[PRELUDE, FORMATS, include_str!("../../../../shaders/rms_norm_grad_weight.wgsl")],
    params: WeightParams::FIELDS,
    bindings: &[
        Binding::read("dy", FLOAT),
        Binding::read("x", FLOAT),
        Binding::read("rstd", F32),
        Binding::in_place("d_weight", F32),
    ],
    constants: &[],
};

impl RowWise for RmsNorm<'_> {
    const SHADERS: &'static [&'static Shader] = &[&RMS_NORM];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.x.rows();
        let params = Params { rows: word(count), columns: word(self.x.cols()), eps: self.eps.to_bits() };
        rows(
            stream,
            &RMS_NORM,
            &[Some(self.x), Some(self.weight), Some(self.out), Some(self.rstd)],
            params.words(),
            count,
        )
    }
}

impl RowWise for RmsNormGrad<'_> {
    const SHADERS: &'static [&'static Shader] = &[&RMS_NORM_GRAD, &RMS_NORM_GRAD_WEIGHT];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let (count, columns, groups) = (self.x.rows(), self.x.cols(), self.d_weight.rows());
        let params = GradParams { rows: word(count), columns: word(columns) };
        let tensors = [Some(self.dy), Some(self.x), Some(self.weight), Some(self.rstd), self.residual, Some(self.dx)];
        rows(stream, &RMS_NORM_GRAD, &tensors, params.words(), count)?;
        let sums = groups * columns;
        let params = WeightParams { elements: word(sums), columns: word(columns), group_rows: word(count / groups) };
        let tensors = [Some(self.dy), Some(self.x), Some(self.rstd), Some(self.d_weight)];
        elements(stream, &RMS_NORM_GRAD_WEIGHT, &tensors, params.words(), sums)
    }
}
