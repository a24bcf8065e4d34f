//! SwiGLU (arXiv 2002.05202) with an optional weight for each row, and its gradient. NUMERICS.md, "Row-wise ops".

use crate::backend::Backend;
use crate::error::Result;
use crate::numerics::{math, reduce};
use crate::ops::arguments::op;
use crate::ops::{Arg, DType, FLOAT, Values, distinct, number};
use crate::tensor::Tensor;

/// `out = weight * silu(gate) * up`, where a row of `gate_up` is gate, then up.
///
/// The router's weight enters here, before the down projection, so that no expert output need be kept for its gradient.
///
/// # Shape
/// gate_up: `[rows, 2 * i]`; weight: f32 `[rows]`; limit: u32 `[1]` (rows from there on are neither read nor written);
/// out: `[rows, i]`, of gate_up's type.
///
/// # Numerics
/// `silu(g) = g * sigmoid(g)`; `(silu(g) * u) * weight`, rounded once.
#[derive(Clone, Copy, Debug)]
pub struct Swiglu<'a> {
    /// Gate and up.
    pub gate_up: &'a Tensor,
    /// Factor of each row.
    pub weight: Option<&'a Tensor>,
    /// Number of rows that count.
    pub limit: Option<&'a Tensor>,
    /// The result, written.
    pub out: &'a Tensor,
}

op!(Swiglu: read(gate_up, weight, limit), write(out));

impl Swiglu<'_> {
    pub(crate) const OP: &'static str = "swiglu";

    pub(super) fn check(&self) -> Result<()> {
        let rows = self.gate_up.rows();
        let width = check(Self::OP, self.gate_up, self.weight, self.limit, "out", self.out)?;
        let mut inputs = vec![self.gate_up];
        inputs.extend(self.weight);
        inputs.extend(self.limit);
        Arg::new(Self::OP, "out", self.out).len(rows * width, "[rows, i]")?;
        distinct(Self::OP, "out", self.out, &inputs)
    }

    /// One row. A weight of 1 has the bits of no weight.
    #[inline(always)]
    pub fn row(gate_up: &[f32], weight: f32, out: &mut [f32]) {
        let (gate, up) = gate_up.split_at(out.len());
        for ((o, &g), u) in out.iter_mut().zip(gate).zip(up) {
            *o = (math::silu(g) * u) * weight;
        }
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (gate_up, weight) = (Values::read(memory, self.gate_up)?, Values::read_opt(memory, self.weight)?);
        let mut out = Values::read(memory, self.out)?;
        let mut row = vec![0.0; self.gate_up.cols() / 2];
        for r in 0..counted(memory, self.limit, self.gate_up.rows())? {
            Swiglu::row(&gate_up.row(r), weight.as_ref().map_or(1.0, |weight| weight.float(r)), &mut row);
            row.iter().enumerate().for_each(|(i, &value)| out.set_float(r * row.len() + i, value));
        }
        out.write(memory)
    }
}

/// The gradients of [`Swiglu`].
///
/// # Shape
/// As [`Swiglu`]; d_out: `[rows, i]`; d_gate_up: `[rows, 2 * i]`; d_weight: f32 `[rows]`.
///
/// # Numerics
/// With s = sigmoid(g), h = silu(g), w = weight (1 if absent):
/// `d_up = (d_out * w) * h`, `d_gate = ((d_out * w) * u) * (s * (1 + g * (1 - s)))`,
/// `d_weight` = quad sum of `d_out * (h * u)`.
#[derive(Clone, Copy, Debug)]
pub struct SwigluGrad<'a> {
    /// Gate and up.
    pub gate_up: &'a Tensor,
    /// Factor of each row.
    pub weight: Option<&'a Tensor>,
    /// Number of rows that count.
    pub limit: Option<&'a Tensor>,
    /// Gradient of the result.
    pub d_out: &'a Tensor,
    /// Gradient of gate and up, written.
    pub d_gate_up: &'a Tensor,
    /// Gradient of the factors, written; given exactly with `weight`.
    pub d_weight: Option<&'a Tensor>,
}

op!(SwigluGrad: read(gate_up, weight, limit, d_out), write(d_gate_up, d_weight));

impl SwigluGrad<'_> {
    pub(crate) const OP: &'static str = "swiglu_grad";

    pub(super) fn check(&self) -> Result<()> {
        let rows = self.gate_up.rows();
        let width = check(Self::OP, self.gate_up, self.weight, self.limit, "d_out", self.d_out)?;
        let dtype = self.gate_up.dtype();
        Arg::new(Self::OP, "d_out", self.d_out).len(rows * width, "[rows, i]")?;
        Arg::new(Self::OP, "d_gate_up", self.d_gate_up).dtype(&[dtype])?.len(rows * 2 * width, "as gate_up")?;
        let mut inputs = vec![self.gate_up, self.d_out];
        inputs.extend(self.weight);
        inputs.extend(self.limit);
        number(
            Self::OP,
            "d_weight",
            self.d_weight.is_some() == self.weight.is_some(),
            "given exactly with weight",
            self.d_weight.is_some(),
        )?;
        if let Some(d_weight) = self.d_weight {
            Arg::new(Self::OP, "d_weight", d_weight).dtype(&[DType::F32])?.len(rows, "one for each row")?;
            distinct(Self::OP, "d_weight", d_weight, &inputs)?;
            inputs.push(d_weight);
        }
        distinct(Self::OP, "d_gate_up", self.d_gate_up, &inputs)
    }

    /// One row; returns the gradient of its weight.
    #[inline(always)]
    pub fn row(gate_up: &[f32], weight: f32, d_out: &[f32], d_gate_up: &mut [f32]) -> f32 {
        let width = d_out.len();
        let (gate, up) = gate_up.split_at(width);
        let (d_gate, d_up) = d_gate_up.split_at_mut(width);
        // Until the last loop, d_gate holds s and d_up holds h, so that each exponential is taken once.
        for ((s, h), &g) in d_gate.iter_mut().zip(d_up.iter_mut()).zip(gate) {
            *s = math::sigmoid(g);
            *h = g * *s;
        }
        let (h, u) = (&d_up[..width], &up[..width]);
        let d_weight = reduce::quads(width, |i| d_out[i] * (h[i] * u[i]));
        for ((((d_gate, d_up), &g), u), d_out) in d_gate.iter_mut().zip(d_up).zip(gate).zip(up).zip(d_out) {
            let (s, h, d) = (*d_gate, *d_up, d_out * weight);
            *d_gate = (d * u) * (s * (1.0 + g * (1.0 - s)));
            *d_up = d * h;
        }
        d_weight
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (gate_up, weight) = (Values::read(memory, self.gate_up)?, Values::read_opt(memory, self.weight)?);
        let d_out = Values::read(memory, self.d_out)?.floats();
        let (mut d_gate_up, mut d_weight) =
            (Values::read(memory, self.d_gate_up)?, Values::read_opt(memory, self.d_weight)?);
        let width = self.gate_up.cols() / 2;
        let mut row = vec![0.0; 2 * width];
        for r in 0..counted(memory, self.limit, self.gate_up.rows())? {
            let factor = weight.as_ref().map_or(1.0, |weight| weight.float(r));
            let sum = SwigluGrad::row(&gate_up.row(r), factor, &d_out[r * width..(r + 1) * width], &mut row);
            row.iter().enumerate().for_each(|(i, &value)| d_gate_up.set_float(r * row.len() + i, value));
            if let Some(d_weight) = &mut d_weight {
                d_weight.set_float(r, sum);
            }
        }
        d_gate_up.write(memory)?;
        d_weight.map_or(Ok(()), |d_weight| d_weight.write(memory))
    }
}

/// The number of rows that count, at most `rows`.
fn counted(memory: &dyn Backend, limit: Option<&Tensor>, rows: usize) -> Result<usize> {
    Ok(Values::read_opt(memory, limit)?.map_or(rows, |limit| rows.min(limit.word(0) as usize)))
}

/// Checks what both ops share and returns i.
fn check(
    op: &'static str,
    gate_up: &Tensor,
    weight: Option<&Tensor>,
    limit: Option<&Tensor>,
    field: &'static str,
    half: &Tensor,
) -> Result<usize> {
    Arg::new(op, "gate_up", gate_up).dtype(FLOAT)?;
    let cols = gate_up.cols();
    number(op, "gate_up", cols.is_multiple_of(2), "an even number of columns (gate, up)", cols)?;
    Arg::new(op, field, half).dtype(&[gate_up.dtype()])?;
    if let Some(weight) = weight {
        Arg::new(op, "weight", weight).dtype(&[DType::F32])?.len(gate_up.rows(), "one for each row")?;
    }
    if let Some(limit) = limit {
        Arg::new(op, "limit", limit).dtype(&[DType::U32])?.len(1, "the number of rows that count")?;
    }
    Ok(cols / 2)
}
