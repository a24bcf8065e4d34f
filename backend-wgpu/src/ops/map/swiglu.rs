//! SwiGLU and its gradient.

use dropless_core::Result;
use dropless_core::ops::{Swiglu, SwigluGrad};

use super::{elements, workgroups};
use crate::dispatch::Stream;
use crate::shader::{Binding, F32, FLOAT, FORMATS, MATH, PRELUDE, ROW, Shader, U32, scalars, word};

scalars!(
    /// Extents; `width`: columns of the result.
    pub(crate) struct SwigluScalars { elements, width }
);

pub(crate) static SWIGLU: Shader<SwigluScalars> = Shader::new(
    "swiglu",
    &[PRELUDE, FORMATS, MATH, include_str!("../../../../shaders/swiglu.wgsl")],
    &[
        Binding::read("gate_up", FLOAT),
        Binding::read("weight", F32).optional(),
        Binding::read("limit", U32).optional(),
        Binding::write("out", FLOAT),
    ],
);

scalars!(
    /// Extents.
    pub(crate) struct SwigluGradScalars { rows, width }
);

pub(crate) static SWIGLU_GRAD: Shader<SwigluGradScalars> = Shader::new(
    "swiglu_grad",
    &[PRELUDE, FORMATS, MATH, ROW, include_str!("../../../../shaders/swiglu_grad.wgsl")],
    &[
        Binding::read("gate_up", FLOAT),
        Binding::read("weight", F32).optional(),
        Binding::read("limit", U32).optional(),
        Binding::read("d_out", FLOAT),
        Binding::write("d_gate_up", FLOAT),
        Binding::write("d_weight", F32).optional(),
    ],
);

pub(super) fn swiglu(stream: &Stream, op: &Swiglu<'_>) -> Result<()> {
    let count = op.out.len();
    let scalars = SwigluScalars { elements: word(count), width: word(op.gate_up.cols() / 2) };
    elements(stream, &SWIGLU, &[Some(op.gate_up), op.weight, op.limit, Some(op.out)], scalars, count)
}

pub(super) fn swiglu_grad(stream: &Stream, op: &SwigluGrad<'_>) -> Result<()> {
    let count = op.gate_up.rows();
    let scalars = SwigluGradScalars { rows: word(count), width: word(op.gate_up.cols() / 2) };
    let tensors = [Some(op.gate_up), op.weight, op.limit, Some(op.d_out), Some(op.d_gate_up), op.d_weight];
    workgroups(stream, &SWIGLU_GRAD, &tensors, scalars, count)
}
