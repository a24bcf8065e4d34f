//! Copies, conversions and sums of whole tensors. NUMERICS.md, "Row-wise ops".

use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, distinct, number};
use crate::tensor::Tensor;

/// `out = x` in another float type (nearest even).
///
/// # Shape
/// Any; both alike.
#[derive(Clone, Copy, Debug)]
pub struct Cast<'a> {
    /// The source.
    pub x: &'a Tensor,
    /// The destination, written.
    pub out: &'a Tensor,
}

op!(Cast: read(x), write(out));

impl Cast<'_> {
    pub(crate) const OP: &'static str = "cast";

    pub(super) fn check(&self) -> Result<()> {
        Arg::new(Self::OP, "x", self.x).dtype(FLOAT)?;
        Arg::new(Self::OP, "out", self.out).dtype(FLOAT)?.len(self.x.len(), "as x")?;
        distinct(Self::OP, "out", self.out, &[self.x])
    }
}

/// `out = a + b`, or `(a + b) + c`.
///
/// # Shape
/// Any; all alike. Types may differ.
#[derive(Clone, Copy, Debug)]
pub struct Add<'a> {
    /// First term.
    pub a: &'a Tensor,
    /// Second term.
    pub b: &'a Tensor,
    /// Third term.
    pub c: Option<&'a Tensor>,
    /// The sum, written.
    pub out: &'a Tensor,
}

op!(Add: read(a, b, c), write(out));

impl Add<'_> {
    pub(crate) const OP: &'static str = "add";

    pub(super) fn check(&self) -> Result<()> {
        Arg::new(Self::OP, "a", self.a).dtype(FLOAT)?;
        let mut inputs = vec![self.a, self.b];
        inputs.extend(self.c);
        for (field, tensor) in [("b", Some(self.b)), ("c", self.c), ("out", Some(self.out))] {
            if let Some(tensor) = tensor {
                Arg::new(Self::OP, field, tensor).dtype(FLOAT)?.len(self.a.len(), "as a")?;
            }
        }
        distinct(Self::OP, "out", self.out, &inputs)
    }

    /// Any number of elements.
    #[inline(always)]
    pub fn row(a: &[f32], b: &[f32], c: Option<&[f32]>, out: &mut [f32]) {
        for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
            *o = a + b;
        }
        if let Some(c) = c {
            for (o, c) in out.iter_mut().zip(c) {
                *o += c;
            }
        }
    }
}

/// `out[..] = value`. A value of 0 also clears integer tensors.
#[derive(Clone, Copy, Debug)]
pub struct Fill<'a> {
    /// The tensor, written.
    pub out: &'a Tensor,
    /// The value.
    pub value: f32,
}

op!(Fill: write(out), value(value));

impl Fill<'_> {
    pub(crate) const OP: &'static str = "fill";

    pub(super) fn check(&self) -> Result<()> {
        let float = FLOAT.contains(&self.out.dtype());
        number(
            Self::OP,
            "value",
            float || self.value.to_bits() == 0,
            "0 for a tensor that is not f32 or bf16",
            self.value,
        )
    }
}

/// Copies `width` columns of every row: `out[r, out_column + i] = x[r, x_column + i]`. Other columns of `out` stay.
///
/// # Shape
/// x: `[rows, ..]`, out: `[rows, ..]`, of one float or u32 type.
#[derive(Clone, Copy, Debug)]
pub struct CopyColumns<'a> {
    /// The source.
    pub x: &'a Tensor,
    /// First column read.
    pub x_column: usize,
    /// The destination, partly written.
    pub out: &'a Tensor,
    /// First column written.
    pub out_column: usize,
    /// Number of columns.
    pub width: usize,
}

op!(CopyColumns: read(x), write(out), value(x_column, out_column, width));

impl CopyColumns<'_> {
    pub(crate) const OP: &'static str = "copy_columns";

    pub(super) fn check(&self) -> Result<()> {
        Arg::new(Self::OP, "x", self.x).dtype(&[DType::F32, DType::Bf16, DType::U32])?;
        Arg::new(Self::OP, "out", self.out).dtype(&[self.x.dtype()])?;
        let (rows, x_cols, out_cols) = (self.x.rows(), self.x.cols(), self.out.cols());
        number(Self::OP, "out", self.out.rows() == rows, &format!("{rows} rows as x"), self.out.rows())?;
        number(
            Self::OP,
            "width",
            self.x_column + self.width <= x_cols && self.out_column + self.width <= out_cols,
            &format!("inside {x_cols} and {out_cols} columns"),
            format_args!("{} from {} to {}", self.width, self.x_column, self.out_column),
        )?;
        distinct(Self::OP, "out", self.out, &[self.x])
    }
}
