//! SwiGLU and its gradient.

use dropless_core::Result;
use dropless_core::launch::Program;
use dropless_core::ops::{Swiglu, SwigluGrad};

use super::{RowWise, elements, workgroups};
use crate::dispatch::Stream;
use crate::shader::{Binding, EX2, F32, FLOAT, FORMATS, PRELUDE, SIGMOID, Shader, U32, scalars, word};

scalars!(
    /// Extents; `width`: columns of the result.
    pub(crate) struct SwigluScalars { elements, width }
);

pub(crate) static SWIGLU: Shader<SwigluScalars> = Shader::new(
    "swiglu",
    &[PRELUDE, FORMATS, EX2, SIGMOID, include_str!("../../../../shaders/swiglu.wgsl")],
    &[
        Binding::read("gate_up", FLOAT),
        Binding::read("weight", F32).optional(),
        Binding::read("limit", U32).optional(),
        Binding::write("out", FLOAT),
    ],
);

/// Rows of a workgroup of the gradient.
const ROWS: usize = 16;

scalars!(
    /// Extents.
    pub(crate) struct SwigluGradScalars { rows, width }
);

pub(crate) static SWIGLU_GRAD: Shader<SwigluGradScalars> = Shader::new(
    "swiglu_grad",
    &[PRELUDE, FORMATS, EX2, SIGMOID, include_str!("../../../../shaders/swiglu_grad.wgsl")],
    &[
        Binding::read("gate_up", FLOAT),
        Binding::read("weight", F32).optional(),
        Binding::read("limit", U32).optional(),
        Binding::read("d_out", FLOAT),
        Binding::write("d_gate_up", FLOAT),
        Binding::write("d_weight", F32).optional(),
    ],
);

impl RowWise for Swiglu<'_> {
    const SHADERS: &'static [&'static Program] = &[&SWIGLU.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.out.len();
        let scalars = SwigluScalars { elements: word(count), width: word(self.gate_up.cols() / 2) };
        elements(stream, &SWIGLU, &[Some(self.gate_up), self.weight, self.limit, Some(self.out)], scalars, count)
    }
}

impl RowWise for SwigluGrad<'_> {
    const SHADERS: &'static [&'static Program] = &[&SWIGLU_GRAD.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let rows = self.gate_up.rows();
        let scalars = SwigluGradScalars { rows: word(rows), width: word(self.gate_up.cols() / 2) };
        let tensors =
            [Some(self.gate_up), self.weight, self.limit, Some(self.d_out), Some(self.d_gate_up), self.d_weight];
        workgroups(stream, &SWIGLU_GRAD, &tensors, scalars, rows.div_ceil(ROWS))
    }
}
