//! SwiGLU and its gradient.

use std::sync::Arc;

use dropless_core::Result;
use dropless_core::ops::{Swiglu, SwigluGrad};

use super::{RUN, Reads, RowWise, rows, turns};
use crate::device::{Gpu, word};
use crate::kernel::{Binding, F32, FLOAT, Kernel, PRELUDE, RUNS, U32, params};

params!(
    /// Extents; `width`: columns of the result.
    Params { rows, width }
);

/// Reads and writes each element of the rows that count once.
pub(crate) static SWIGLU: Kernel = Kernel {
    name: "swiglu",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/swiglu.cu")],
    params: Params::FIELDS,
    tensors: &[
        Binding::read("gate_up", FLOAT),
        Binding::read("weight", F32).optional(),
        Binding::read("limit", U32).optional(),
        Binding::write("out", FLOAT),
    ],
    maps: 0,
    constants: &[],
};

/// Reads and writes each element of the rows that count once.
pub(crate) static SWIGLU_GRAD: Kernel = Kernel {
    name: "swiglu_grad",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/swiglu_grad.cu")],
    params: Params::FIELDS,
    tensors: &[
        Binding::read("gate_up", FLOAT),
        Binding::read("weight", F32).optional(),
        Binding::read("limit", U32).optional(),
        Binding::read("d_out", FLOAT),
        Binding::write("d_gate_up", FLOAT),
        Binding::write("d_weight", F32).optional(),
    ],
    maps: 0,
    constants: &[],
};

impl RowWise for Swiglu<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&SWIGLU];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let (count, width) = (self.gate_up.rows(), self.gate_up.cols() / 2);
        let params = Params { rows: word(count), width: word(width) };
        let tensors = [Some(self.gate_up), self.weight, self.limit, Some(self.out)];
        turns(gpu, &SWIGLU, &tensors, params.words(), count * width.div_ceil(RUN), Reads::Once)
    }
}

impl RowWise for SwigluGrad<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&SWIGLU_GRAD];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let count = self.gate_up.rows();
        let params = Params { rows: word(count), width: word(self.gate_up.cols() / 2) };
        let tensors =
            [Some(self.gate_up), self.weight, self.limit, Some(self.d_out), Some(self.d_gate_up), self.d_weight];
        rows(gpu, &SWIGLU_GRAD, &tensors, params.words(), count, Reads::Once)
    }
}
