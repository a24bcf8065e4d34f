//! SwiGLU and its gradient.

use std::sync::Arc;

use dropless_core::Result;
use dropless_core::launch::Program;
use dropless_core::ops::{Swiglu, SwigluGrad};

use super::{RUN, Reads, RowWise, turns, warps};
use crate::device::Gpu;
use crate::kernel::{Binding, F32, FLOAT, Kernel, PRELUDE, RUNS, U32, scalars, word};

scalars!(
    /// Extents; `width`: columns of the result.
    pub(crate) struct SwigluScalars { rows, width }
);

/// Reads and writes each element of the rows that count once.
pub(crate) static SWIGLU: Kernel<SwigluScalars> = Kernel::new(
    "swiglu",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/swiglu.cu")],
    &[
        Binding::read("gate_up", FLOAT),
        Binding::read("weight", F32).optional(),
        Binding::read("limit", U32).optional(),
        Binding::write("out", FLOAT),
    ],
);

/// Reads and writes each element of the rows that count once.
pub(crate) static SWIGLU_GRAD: Kernel<SwigluScalars> = Kernel::new(
    "swiglu_grad",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/swiglu_grad.cu")],
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
    const KERNELS: &'static [&'static Program] = &[&SWIGLU.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let (count, width) = (self.gate_up.rows(), self.gate_up.cols() / 2);
        let scalars = SwigluScalars { rows: word(count), width: word(width) };
        let tensors = [Some(self.gate_up), self.weight, self.limit, Some(self.out)];
        turns(gpu, &SWIGLU, &tensors, scalars, count * width.div_ceil(RUN), Reads::Once)
    }
}

impl RowWise for SwigluGrad<'_> {
    const KERNELS: &'static [&'static Program] = &[&SWIGLU_GRAD.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let count = self.gate_up.rows();
        let scalars = SwigluScalars { rows: word(count), width: word(self.gate_up.cols() / 2) };
        let tensors =
            [Some(self.gate_up), self.weight, self.limit, Some(self.d_out), Some(self.d_gate_up), self.d_weight];
        warps(gpu, &SWIGLU_GRAD, &tensors, scalars, count, Reads::Once)
    }
}
