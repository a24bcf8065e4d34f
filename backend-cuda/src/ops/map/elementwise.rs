//! Copies, conversions and sums of whole tensors.

use std::sync::Arc;

use dropless_core::ops::{Add, Cast, CopyColumns, Fill};
use dropless_core::{DType, Result};

use super::{RUN, elements, threads};
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

pub(super) fn cast(gpu: &Arc<Gpu>, op: &Cast<'_>) -> Result<()> {
    elements(gpu, &CAST, &[Some(op.x), Some(op.out)], &[], |elements| Elements { elements }.words())
}

pub(super) fn add(gpu: &Arc<Gpu>, op: &Add<'_>) -> Result<()> {
    let tensors = [Some(op.a), Some(op.b), op.c, Some(op.out)];
    elements(gpu, &ADD, &tensors, &[], |elements| Elements { elements }.words())
}

/// Other types than floats are filled with zeros only.
pub(super) fn fill(gpu: &Arc<Gpu>, op: &Fill<'_>) -> Result<()> {
    let value = op.value.to_bits();
    if value == 0 {
        return gpu.fill("fill", op.out, 0);
    }
    elements(gpu, &FILL, &[Some(op.out)], &[], |elements| FillParams { elements, value }.words())
}

pub(super) fn copy_columns(gpu: &Arc<Gpu>, op: &CopyColumns<'_>) -> Result<()> {
    let params = CopyColumnsParams {
        rows: word(op.x.rows()),
        width: word(op.width),
        x_columns: word(op.x.cols()),
        x_column: word(op.x_column),
        out_columns: word(op.out.cols()),
        out_column: word(op.out_column),
    };
    let runs = op.x.rows() * op.width.div_ceil(RUN);
    threads(gpu, &COPY_COLUMNS, &[Some(op.x), Some(op.out)], params.words(), runs)
}
