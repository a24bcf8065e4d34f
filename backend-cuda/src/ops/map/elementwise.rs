//! Copies, conversions and sums of whole tensors.

use std::sync::Arc;

use dropless_core::ops::{Add, Cast, CopyColumns, Fill};
use dropless_core::{DType, Result};

use super::{RUN, elements, threads};
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

pub(super) fn cast(gpu: &Arc<Gpu>, op: &Cast<'_>) -> Result<()> {
    elements(gpu, &CAST, &[Some(op.x), Some(op.out)], &[], |elements| Elements { elements })
}

pub(super) fn add(gpu: &Arc<Gpu>, op: &Add<'_>) -> Result<()> {
    let tensors = [Some(op.a), Some(op.b), op.c, Some(op.out)];
    elements(gpu, &ADD, &tensors, &[], |elements| Elements { elements })
}

/// Other types than floats are filled with zeros only.
pub(super) fn fill(gpu: &Arc<Gpu>, op: &Fill<'_>) -> Result<()> {
    let value = op.value.to_bits();
    if value == 0 {
        return gpu.fill("fill", op.out, 0);
    }
    elements(gpu, &FILL, &[Some(op.out)], &[], |elements| FillScalars { elements, value })
}

pub(super) fn copy_columns(gpu: &Arc<Gpu>, op: &CopyColumns<'_>) -> Result<()> {
    let scalars = CopyColumnsScalars {
        rows: word(op.x.rows()),
        width: word(op.width),
        x_columns: word(op.x.cols()),
        x_column: word(op.x_column),
        out_columns: word(op.out.cols()),
        out_column: word(op.out_column),
    };
    let runs = op.x.rows() * op.width.div_ceil(RUN);
    threads(gpu, &COPY_COLUMNS, &[Some(op.x), Some(op.out)], scalars, runs)
}
