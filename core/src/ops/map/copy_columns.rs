//! Columns of one matrix into another. NUMERICS.md, "Row-wise ops".

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, Values, distinct, number};
use crate::tensor::Tensor;

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

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (x, mut out) = (Values::read(memory, self.x)?, Values::read(memory, self.out)?);
        let size = self.x.dtype().size();
        for r in 0..self.x.rows() {
            let from = (r * self.x.cols() + self.x_column) * size;
            let to = (r * self.out.cols() + self.out_column) * size;
            out.bytes_mut()[to..to + self.width * size].copy_from_slice(&x.bytes()[from..from + self.width * size]);
        }
        out.write(memory)
    }
}
