//! SwiGLU and its gradient.

use dropless_core::Result;
use dropless_core::ops::{Swiglu, SwigluGrad};

use super::{RowWise, elements, rows};
use crate::dispatch::{Stream, word};
use crate::shader::{Binding, F32, FLOAT, FORMATS, MATH, PRELUDE, ROW, Shader, U32, params};

params!(
    /// Extents; `width`: columns of the result.
    Params { elements, width }
);

pub(crate) static SWIGLU: Shader = Shader {
    name: "swiglu",
    files: &[PRELUDE, FORMATS, MATH, include_str!("../../../../shaders/swiglu.wgsl")],
    params: Params::FIELDS,
    bindings: &[
        Binding::read("gate_up", FLOAT),
        Binding::read("weight", F32).optional(),
        Binding::read("limit", U32).optional(),
        Binding::write("out", FLOAT),
    ],
    constants: &[],
};

params!(
    /// Extents.
    GradParams { rows, width }
);

pub(crate) static SWIGLU_GRAD: Shader = Shader {
    name: "swiglu_grad",
    files: &[PRELUDE, FORMATS, MATH, ROW, include_str!("../../../../shaders/swiglu_grad.wgsl")],
    params: GradParams::FIELDS,
    bindings: &[
        Binding::read("gate_up", FLOAT),
        Binding::read("weight", F32).optional(),
        Binding::read("limit", U32).optional(),
        Binding::read("d_out", FLOAT),
        Binding::write("d_gate_up", FLOAT),
        Binding::write("d_weight", F32).optional(),
    ],
    constants: &[],
};

impl RowWise for Swiglu<'_> {
    const SHADERS: &'static [&'static Shader] = &[&SWIGLU];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.out.len();
        let params = Params { elements: word(count), width: word(self.gate_up.cols() / 2) };
        elements(stream, &SWIGLU, &[Some(self.gate_up), self.weight, self.limit, Some(self.out)], params.words(), count)
    }
}

impl RowWise for SwigluGrad<'_> {
    const SHADERS: &'static [&'static Shader] = &[&SWIGLU_GRAD];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.gate_up.rows();
        let params = GradParams { rows: word(count), width: word(self.gate_up.cols() / 2) };
        let tensors =
            [Some(self.gate_up), self.weight, self.limit, Some(self.d_out), Some(self.d_gate_up), self.d_weight];
        rows(stream, &SWIGLU_GRAD, &tensors, params.words(), count)
    }
}
