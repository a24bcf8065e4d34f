//! RMSNorm (arXiv 1910.07467) and its gradient. NUMERICS.md, "Row-wise ops".

use crate::backend::Backend;
use crate::error::Result;
use crate::numerics::reduce;
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, Values, distinct, number};
use crate::tensor::Tensor;

/// `out = x * rstd * weight` with `rstd = 1 / sqrt(mean(x^2) + eps)`.
///
/// # Shape
/// x, out: `[rows, cols]` of one type; weight: f32 `[cols]`; rstd: f32 `[rows]`, written.
///
/// # Numerics
/// The sum of squares is a row reduction; `(x * rstd) * weight`, rounded once.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    /// The rows.
    pub x: &'a Tensor,
    /// The norm weight.
    pub weight: &'a Tensor,
    /// Added to the mean square.
    pub eps: f32,
    /// The result, written.
    pub out: &'a Tensor,
    /// The reciprocal root mean square, written.
    pub rstd: &'a Tensor,
}

op!(RmsNorm: read(x, weight), write(out, rstd), value(eps));

impl RmsNorm<'_> {
    pub(crate) const OP: &'static str = "rms_norm";

    pub(super) fn check(&self) -> Result<()> {
        let (rows, cols) = (self.x.rows(), self.x.cols());
        Arg::new(Self::OP, "x", self.x).dtype(FLOAT)?;
        Arg::new(Self::OP, "weight", self.weight).dtype(&[DType::F32])?.len(cols, "one for each column")?;
        Arg::new(Self::OP, "out", self.out).dtype(&[self.x.dtype()])?.len(rows * cols, "as x")?;
        Arg::new(Self::OP, "rstd", self.rstd).dtype(&[DType::F32])?.len(rows, "one for each row")?;
        distinct(Self::OP, "out", self.out, &[self.x, self.weight, self.rstd])?;
        distinct(Self::OP, "rstd", self.rstd, &[self.x, self.weight])
    }

    /// One row; returns its rstd.
    #[inline(always)]
    pub fn row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> f32 {
        let mean = reduce::row(x.len(), |i| x[i] * x[i]) / x.len() as f32;
        let rstd = 1.0 / (mean + eps).sqrt();
        for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
            *o = (x * rstd) * w;
        }
        rstd
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (x, weight) = (Values::read(memory, self.x)?, Values::read(memory, self.weight)?.floats());
        let (mut out, mut rstd) = (Values::read(memory, self.out)?, Values::read(memory, self.rstd)?);
        let mut row = vec![0.0; weight.len()];
        for r in 0..self.x.rows() {
            rstd.set_float(r, RmsNorm::row(&x.row(r), &weight, self.eps, &mut row));
            out.set_row(r, &row);
        }
        out.write(memory)?;
        rstd.write(memory)
    }
}

/// The gradients of [`RmsNorm`].
///
/// # Shape
/// dy, x, dx, residual: `[rows, cols]` of one type; d_weight: f32 `[groups, cols]` (groups of equally many rows, the
/// shards of the gradient), **added to**.
///
/// # Numerics
/// With g = dy * weight and c = (row reduction of g * x) / cols: `dx = rstd * (g - x * ((rstd * rstd) * c))` (plus
/// `residual`, added before the one rounding); `d_weight += column sum of dy * (x * rstd)` by the token-sum rule.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormGrad<'a> {
    /// Gradient of the result.
    pub dy: &'a Tensor,
    /// The rows.
    pub x: &'a Tensor,
    /// The norm weight.
    pub weight: &'a Tensor,
    /// As [`RmsNorm`] wrote it.
    pub rstd: &'a Tensor,
    /// Another gradient of x, added to dx (the residual stream).
    pub residual: Option<&'a Tensor>,
    /// Gradient of x, written.
    pub dx: &'a Tensor,
    /// Gradient of the norm weight, added to.
    pub d_weight: &'a Tensor,
}

op!(RmsNormGrad: read(dy, x, weight, rstd, residual), write(dx), update(d_weight));

impl RmsNormGrad<'_> {
    pub(crate) const OP: &'static str = "rms_norm_grad";

    pub(super) fn check(&self) -> Result<()> {
        let (rows, cols) = (self.x.rows(), self.x.cols());
        let dtype = self.x.dtype();
        Arg::new(Self::OP, "x", self.x).dtype(FLOAT)?;
        Arg::new(Self::OP, "dy", self.dy).dtype(&[dtype])?.len(rows * cols, "as x")?;
        Arg::new(Self::OP, "dx", self.dx).dtype(&[dtype])?.len(rows * cols, "as x")?;
        Arg::new(Self::OP, "weight", self.weight).dtype(&[DType::F32])?.len(cols, "one for each column")?;
        Arg::new(Self::OP, "rstd", self.rstd).dtype(&[DType::F32])?.len(rows, "one for each row")?;
        Arg::new(Self::OP, "d_weight", self.d_weight).dtype(&[DType::F32])?;
        let groups = self.d_weight.rows();
        number(
            Self::OP,
            "d_weight",
            self.d_weight.cols() == cols && groups > 0 && rows.is_multiple_of(groups),
            &format!("[groups, {cols}] with groups dividing {rows} rows"),
            format_args!("{:?}", self.d_weight),
        )?;
        let mut inputs = vec![self.dy, self.x, self.weight, self.rstd];
        if let Some(residual) = self.residual {
            Arg::new(Self::OP, "residual", residual).dtype(&[dtype])?.len(rows * cols, "as x")?;
            inputs.push(residual);
        }
        distinct(Self::OP, "d_weight", self.d_weight, &inputs)?;
        inputs.push(self.d_weight);
        distinct(Self::OP, "dx", self.dx, &inputs)
    }

    /// The gradient of one row.
    #[inline(always)]
    pub fn row(dy: &[f32], x: &[f32], weight: &[f32], rstd: f32, residual: Option<&[f32]>, dx: &mut [f32]) {
        let (dy, weight) = (&dy[..x.len()], &weight[..x.len()]);
        let c = reduce::row(x.len(), |i| (dy[i] * weight[i]) * x[i]) / x.len() as f32;
        let along = (rstd * rstd) * c;
        for (((dx, dy), x), w) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
            *dx = rstd * (dy * w - x * along);
        }
        if let Some(residual) = residual {
            for (dx, r) in dx.iter_mut().zip(residual) {
                *dx += r;
            }
        }
    }

    /// What one row contributes to the gradient of the norm weight.
    #[inline(always)]
    pub fn weight_row(dy: &[f32], x: &[f32], rstd: f32, terms: &mut [f32]) {
        for ((t, dy), x) in terms.iter_mut().zip(dy).zip(x) {
            *t = dy * (x * rstd);
        }
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (dy, x) = (Values::read(memory, self.dy)?, Values::read(memory, self.x)?);
        let (weight, rstd) = (Values::read(memory, self.weight)?.floats(), Values::read(memory, self.rstd)?.floats());
        let residual = Values::read_opt(memory, self.residual)?;
        let (mut dx, mut d_weight) = (Values::read(memory, self.dx)?, Values::read(memory, self.d_weight)?);
        let (rows, cols) = (rstd.len(), weight.len());
        let (mut row, mut terms) = (vec![0.0; cols], vec![0.0; rows * cols]);
        for r in 0..rows {
            let residual = residual.as_ref().map(|residual| residual.row(r));
            RmsNormGrad::row(&dy.row(r), &x.row(r), &weight, rstd[r], residual.as_deref(), &mut row);
            dx.set_row(r, &row);
            RmsNormGrad::weight_row(&dy.row(r), &x.row(r), rstd[r], &mut terms[r * cols..(r + 1) * cols]);
        }
        let groups = self.d_weight.rows();
        for (group, col) in (0..groups).flat_map(|group| (0..cols).map(move |col| (group, col))) {
            let sum = reduce::tokens(rows / groups, |r| terms[(group * (rows / groups) + r) * cols + col]);
            let i = group * cols + col;
            d_weight.set_float(i, d_weight.float(i) + sum);
        }
        dx.write(memory)?;
        d_weight.write(memory)
    }
}
