//! Copies, conversions and sums of whole tensors.

use std::sync::Arc;

use dropless_core::ops::{Add, Cast, CopyColumns, Fill};
use dropless_core::{DType, Result, Tensor};

use super::{RUN, threads};
use crate::device::{Gpu, word};
use crate::kernel::{Binding, FLOAT, Kernel, PRELUDE, RUNS, params};

params!(
    /// Extents, whose product is the number of elements.
    Elements { rows, columns }
);

impl Elements {
    fn of(tensor: &Tensor) -> Elements {
        Elements { rows: word(tensor.rows()), columns: word(tensor.cols()) }
    }
}

/// Reads and writes each element once.
pub(crate) static CAST: Kernel = Kernel {
    name: "cast",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/cast.cu")],
    params: Elements::DECLARATION,
    tensors: &[Binding::read("x", FLOAT), Binding::write("out", FLOAT)],
    maps: 0,
    constants: &[],
};

/// Reads and writes each element once.
pub(crate) static ADD: Kernel = Kernel {
    name: "add",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/add.cu")],
    params: Elements::DECLARATION,
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
    /// Extents; `value`: the bits of an f32.
    FillParams { rows, columns, value }
);

/// Writes each element once.
pub(crate) static FILL: Kernel = Kernel {
    name: "fill",
    files: &[PRELUDE, RUNS, include_str!("../../../../kernels/fill.cu")],
    params: FillParams::DECLARATION,
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
    params: CopyColumnsParams::DECLARATION,
    tensors: &[
        Binding::read("x", &[DType::F32, DType::Bf16, DType::U32]),
        Binding::write("out", &[DType::F32, DType::Bf16, DType::U32]),
    ],
    maps: 0,
    constants: &[],
};

pub(super) fn cast(gpu: &Arc<Gpu>, op: &Cast<'_>) -> Result<()> {
    let runs = op.out.len().div_ceil(RUN);
    threads(gpu, &CAST, &[Some(op.x), Some(op.out)], Elements::of(op.out).words(), runs)
}

pub(super) fn add(gpu: &Arc<Gpu>, op: &Add<'_>) -> Result<()> {
    let runs = op.out.len().div_ceil(RUN);
    threads(gpu, &ADD, &[Some(op.a), Some(op.b), op.c, Some(op.out)], Elements::of(op.out).words(), runs)
}

/// Other types than floats are filled with zeros only.
pub(super) fn fill(gpu: &Arc<Gpu>, op: &Fill<'_>) -> Result<()> {
    let value = op.value.to_bits();
    if value == 0 {
        return gpu.fill("fill", op.out, 0);
    }
    let Elements { rows, columns } = Elements::of(op.out);
    let params = FillParams { rows, columns, value };
    threads(gpu, &FILL, &[Some(op.out)], params.words(), op.out.len().div_ceil(RUN))
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
