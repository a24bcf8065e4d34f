//! Copies, conversions and sums of whole tensors.

use std::sync::Arc;

use dropless_core::launch::Program;
use dropless_core::ops::{Add, Cast, CopyColumns, Fill};
use dropless_core::{DType, Result};

use super::{RUN, RowWise, elements, threads};
use crate::device::Gpu;
use crate::kernel::{Binding, FLOAT, Kernel, PRELUDE, RUNS, scalars, word};

scalars!(
    /// How many.
    pub(crate) struct Elements { elements }
);

/// Reads and writes each element once.
pub(crate) static CAST: Kernel<Elements> = Kernel::new(
    "cast",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/cast.cu")],
    &[Binding::read("x", FLOAT), Binding::write("out", FLOAT)],
);

/// Reads and writes each element once.
pub(crate) static ADD: Kernel<Elements> = Kernel::new(
    "add",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/add.cu")],
    &[
        Binding::read("a", FLOAT),
        Binding::read("b", FLOAT),
        Binding::read("c", FLOAT).optional(),
        Binding::write("out", FLOAT),
    ],
);

scalars!(
    /// `elements`: how many; `value`: the bits of an f32.
    pub(crate) struct FillScalars { elements, value }
);

/// Writes each element once.
pub(crate) static FILL: Kernel<FillScalars> =
    Kernel::new("fill", &[PRELUDE, RUNS, include_str!("../../../../kernels/fill.cu")], &[Binding::write("out", FLOAT)]);

scalars!(
    /// Extents.
    pub(crate) struct CopyColumnsScalars { rows, width, x_columns, x_column, out_columns, out_column }
);

/// Reads and writes each copied element once.
pub(crate) static COPY_COLUMNS: Kernel<CopyColumnsScalars> = Kernel::new(
    "copy_columns",
    &[PRELUDE, RUNS, include_str!("../../../../kernels/copy_columns.cu")],
    &[
        Binding::read("x", &[DType::F32, DType::Bf16, DType::U32]),
        Binding::write("out", &[DType::F32, DType::Bf16, DType::U32]),
    ],
);

impl RowWise for Cast<'_> {
    const KERNELS: &'static [&'static Program] = &[&CAST.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        elements(gpu, &CAST, &[Some(self.x), Some(self.out)], &[], |elements| Elements { elements })
    }
}

impl RowWise for Add<'_> {
    const KERNELS: &'static [&'static Program] = &[&ADD.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let tensors = [Some(self.a), Some(self.b), self.c, Some(self.out)];
        elements(gpu, &ADD, &tensors, &[], |elements| Elements { elements })
    }
}

/// Other types than floats are filled with zeros only.
impl RowWise for Fill<'_> {
    const KERNELS: &'static [&'static Program] = &[&FILL.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let value = self.value.to_bits();
        if value == 0 {
            return gpu.fill("fill", self.out, 0);
        }
        elements(gpu, &FILL, &[Some(self.out)], &[], |elements| FillScalars { elements, value })
    }
}

impl RowWise for CopyColumns<'_> {
    const KERNELS: &'static [&'static Program] = &[&COPY_COLUMNS.program];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let scalars = CopyColumnsScalars {
            rows: word(self.x.rows()),
            width: word(self.width),
            x_columns: word(self.x.cols()),
            x_column: word(self.x_column),
            out_columns: word(self.out.cols()),
            out_column: word(self.out_column),
        };
        let runs = self.x.rows() * self.width.div_ceil(RUN);
        threads(gpu, &COPY_COLUMNS, &[Some(self.x), Some(self.out)], scalars, runs)
    }
}
