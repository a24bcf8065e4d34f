//! Copies, conversions and sums of whole tensors.

use std::sync::Arc;

use dropless_core::ops::{Add, Cast, CopyColumns, Fill};
use dropless_core::{DType, Result};

use super::{RUN, RowWise, elements, threads};
use crate::device::{Gpu, word};
use crate::kernel::{Binding, FLOAT, Kernel, PRELUDE, RUNS, params};

params!(
    /// How many.
    Elements { elements }
);

/// Reads and writes each element once.
pub(crate) static CAST: Kernel = Kernel {
    name: "cast",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/cast.cu")],
    params: Elements::FIELDS,
    tensors: &[Binding::read("x", FLOAT), Binding::write("out", FLOAT)],
    maps: 0,
    constants: &[],
};

/// Reads and writes each element once.
pub(crate) static ADD: Kernel = Kernel {
    name: "add",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/add.cu")],
    params: Elements::FIELDS,
    tensors: &[
        Binding::read("a", FLOAT),
        Binding::read("b", FLOAT),
        Binding::read("c", FLOAT).optional(),
        Binding::write("out", FLOAT),
    ],
    maps: 0,
    constants: &[],
};

params!(
    /// `elements`: how many; `value`: the bits of an f32.
    FillParams { elements, value }
);

/// Writes each element once.
pub(crate) static FILL: Kernel = Kernel {
    name: "fill",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/fill.cu")],
    params: FillParams::FIELDS,
    tensors: &[Binding::write("out", FLOAT)],
    maps: 0,
    constants: &[],
};

params!(
    /// Extents.
    CopyColumnsParams { rows, width, x_columns, x_column, out_columns, out_column }
);

/// Reads and writes each copied element once.
pub(crate) static COPY_COLUMNS: Kernel = Kernel {
    name: "copy_columns",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/copy_columns.cu")],
    params: CopyColumnsParams::FIELDS,
    tensors: &[
        Binding::read("x", &[DType::F32, DType::Bf16, DType::U32]),
        Binding::write("out", &[DType::F32, DType::Bf16, DType::U32]),
    ],
    maps: 0,
    constants: &[],
};

impl RowWise for Cast<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&CAST];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        elements(gpu, &CAST, &[Some(self.x), Some(self.out)], &[], |elements| Elements { elements }.words())
    }
}

impl RowWise for Add<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&ADD];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let tensors = [Some(self.a), Some(self.b), self.c, Some(self.out)];
        elements(gpu, &ADD, &tensors, &[], |elements| Elements { elements }.words())
    }
}

/// Other types than floats are filled with zeros only.
impl RowWise for Fill<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&FILL];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let value = self.value.to_bits();
        if value == 0 {
            return gpu.fill("fill", self.out, 0);
        }
        elements(gpu, &FILL, &[Some(self.out)], &[], |elements| FillParams { elements, value }.words())
    }
}

impl RowWise for CopyColumns<'_> {
    const KERNELS: &'static [&'static Kernel] = &[&COPY_COLUMNS];

    fn queue(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let params = CopyColumnsParams {
            rows: word(self.x.rows()),
            width: word(self.width),
            x_columns: word(self.x.cols()),
            x_column: word(self.x_column),
            out_columns: word(self.out.cols()),
            out_column: word(self.out_column),
        };
        let runs = self.x.rows() * self.width.div_ceil(RUN);
        threads(gpu, &COPY_COLUMNS, &[Some(self.x), Some(self.out)], params.words(), runs)
    }
}
