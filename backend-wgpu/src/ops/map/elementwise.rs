//! Copies, conversions and sums of whole tensors.

use dropless_core::ops::{Add, Cast, CopyColumns, Fill};
use dropless_core::{DType, Result, Tensor};

use super::{RowWise, elements};
use crate::dispatch::{Stream, word};
use crate::shader::{Binding, FLOAT, FORMATS, PRELUDE, Shader, params};

params!(
    /// Extents.
    Elements { elements }
);

pub(crate) static CAST: Shader = Shader {
    name: "cast",
    files: &[PRELUDE, FORMATS, include_str!("../../../../shaders/cast.wgsl")],
    params: Elements::FIELDS,
    bindings: &[Binding::read("x", FLOAT), Binding::write("out", FLOAT)],
    constants: &[],
};

pub(crate) static ADD: Shader = Shader {
    name: "add",
    files: &[PRELUDE, FORMATS, include_str!("../../../../shaders/add.wgsl")],
    params: Elements::FIELDS,
    bindings: &[
        Binding::read("a", FLOAT),
        Binding::read("b", FLOAT),
        Binding::read("c", FLOAT).optional(),
        Binding::write("out", FLOAT),
    ],
    constants: &[],
};

params!(
    /// `value`: the bits of an f32.
    FillParams { elements, value }
);

pub(crate) static FILL: Shader = Shader {
    name: "fill",
    files: &[PRELUDE, FORMATS, include_str!("../../../../shaders/fill.wgsl")],
    params: FillParams::FIELDS,
    bindings: &[Binding::write(
        "out",
        &[DType::F32, DType::Bf16, DType::U32, DType::E4m3, DType::Ue8m0, DType::E2m1x2],
    )],
    constants: &[],
};

params!(
    /// Extents; `elements`: rows times `width`.
    CopyColumnsParams { elements, width, x_columns, x_column, out_columns, out_column }
);

pub(crate) static COPY_COLUMNS: Shader = Shader {
    name: "copy_columns",
    files: &[PRELUDE, FORMATS, include_str!("../../../../shaders/copy_columns.wgsl")],
    params: CopyColumnsParams::FIELDS,
    bindings: &[
        Binding::read("x", &[DType::F32, DType::Bf16, DType::U32]),
        Binding::write("out", &[DType::F32, DType::Bf16, DType::U32]),
    ],
    constants: &[],
};

impl RowWise for Cast<'_> {
    const SHADERS: &'static [&'static Shader] = &[&CAST];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.out.len();
        elements(stream, &CAST, &[Some(self.x), Some(self.out)], Elements { elements: word(count) }.words(), count)
    }
}

impl RowWise for Add<'_> {
    const SHADERS: &'static [&'static Shader] = &[&ADD];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.out.len();
        let tensors = [Some(self.a), Some(self.b), self.c, Some(self.out)];
        elements(stream, &ADD, &tensors, Elements { elements: word(count) }.words(), count)
    }
}

impl RowWise for Fill<'_> {
    const SHADERS: &'static [&'static Shader] = &[&FILL];

    fn queue(&self, stream: &Stream) -> Result<()> {
        fill_bits(stream, self.out, self.value.to_bits())
    }
}

/// Fills with the bits of an f32, or with an integer.
pub(crate) fn fill_bits(stream: &Stream, out: &Tensor, value: u32) -> Result<()> {
    let params = FillParams { elements: word(out.len()), value };
    elements(stream, &FILL, &[Some(out)], params.words(), out.len())
}

impl RowWise for CopyColumns<'_> {
    const SHADERS: &'static [&'static Shader] = &[&COPY_COLUMNS];

    fn queue(&self, stream: &Stream) -> Result<()> {
        let count = self.x.rows() * self.width;
        let params = CopyColumnsParams {
            elements: word(count),
            width: word(self.width),
            x_columns: word(self.x.cols()),
            x_column: word(self.x_column),
            out_columns: word(self.out.cols()),
            out_column: word(self.out_column),
        };
        elements(stream, &COPY_COLUMNS, &[Some(self.x), Some(self.out)], params.words(), count)
    }
}
