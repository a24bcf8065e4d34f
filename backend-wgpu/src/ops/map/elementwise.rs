//! Copies, conversions and sums of whole tensors.

use dropless_core::launch::Program;
use dropless_core::ops::{Add, Cast, CopyColumns, Fill};
use dropless_core::{DType, Result, Tensor};

use super::{RowWise, elements};
use crate::dispatch::Stream;
use crate::shader::{Binding, FLOAT, FORMATS, PRELUDE, Shader, scalars, word};

scalars!(
    /// Extents.
    pub(crate) struct Elements { elements }
);

pub(crate) static CAST: Shader<Elements> = Shader::new(
    "cast",
    &[PRELUDE, FORMATS, include_str!("../../../../shaders/cast.wgsl")],
    &[Binding::read("x", FLOAT), Binding::write("out", FLOAT)],
);

pub(crate) static ADD: Shader<Elements> = Shader::new(
    "add",
    &[PRELUDE, FORMATS, include_str!("../../../../shaders/add.wgsl")],
    &[
        Binding::read("a", FLOAT),
        Binding::read("b", FLOAT),
        Binding::read("c", FLOAT).optional(),
        Binding::write("out", FLOAT),
    ],
);

scalars!(
    /// `value`: the bits of an f32.
    pub(crate) struct FillScalars { elements, value }
);

pub(crate) static FILL: Shader<FillScalars> = Shader::new(
    "fill",
    &[PRELUDE, FORMATS, include_str!("../../../../shaders/fill.wgsl")],
    &[Binding::write("out", &[DType::F32, DType::Bf16, DType::U32, DType::E4m3, DType::Ue8m0, DType::E2m1x2])],
);

scalars!(
    /// Extents; `elements`: rows times `width`.
    pub(crate) struct CopyColumnsScalars { elements, width, x_columns, x_column, out_columns, out_column }
);

pub(crate) static COPY_COLUMNS: Shader<CopyColumnsScalars> = Shader::new(
    "copy_columns",
    &[PRELUDE, FORMATS, include_str!("../../../../shaders/copy_columns.wgsl")],
    &[
        Binding::read("x", &[DType::F32, DType::Bf16, DType::U32]),
        Binding::write("out", &[DType::F32, DType::Bf16, DType::U32]),
    ],
);

impl RowWise for Cast<'_> {
    const SHADERS: &'static [&'static Program] = &[&CAST.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.out.len();
        elements(stream, &CAST, &[Some(self.x), Some(self.out)], Elements { elements: word(count) }, count)
    }
}

impl RowWise for Add<'_> {
    const SHADERS: &'static [&'static Program] = &[&ADD.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.out.len();
        let tensors = [Some(self.a), Some(self.b), self.c, Some(self.out)];
        elements(stream, &ADD, &tensors, Elements { elements: word(count) }, count)
    }
}

impl RowWise for Fill<'_> {
    const SHADERS: &'static [&'static Program] = &[&FILL.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        fill_bits(stream, self.out, self.value.to_bits())
    }
}

/// Fills with the bits of an f32, or with an integer.
pub(crate) fn fill_bits(stream: &Stream, out: &Tensor, value: u32) -> Result<()> {
    let scalars = FillScalars { elements: word(out.len()), value };
    elements(stream, &FILL, &[Some(out)], scalars, out.len())
}

impl RowWise for CopyColumns<'_> {
    const SHADERS: &'static [&'static Program] = &[&COPY_COLUMNS.program];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.x.rows() * self.width;
        let scalars = CopyColumnsScalars {
            elements: word(count),
            width: word(self.width),
            x_columns: word(self.x.cols()),
            x_column: word(self.x_column),
            out_columns: word(self.out.cols()),
            out_column: word(self.out_column),
        };
        elements(stream, &COPY_COLUMNS, &[Some(self.x), Some(self.out)], scalars, count)
    }
}
