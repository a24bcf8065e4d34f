//! Matrix products over ragged groups of rows. NUMERICS.md, "Matrix products".
//!
//! The rows of a group are the tokens of one expert. One call covers every group; the group sizes stay on the device.
//! A dense product is a grouped product with one group.

mod product;
mod split;

pub use product::{Product, Ragged, Side};
pub use split::{SPLIT_BLOCK, Split};

use std::ops::Range;

use super::arguments::{Access, Field, FieldName, Use, View, op, queued};
use super::{Arg, Checked, DType, FLOAT, Values, distinct, number, offsets};
use crate::backend::{Backend, Caps};
use crate::error::Result;
use crate::numerics::{NumericModel, bf16, e4m3, mma, ue8m0};
use crate::tensor::Tensor;

/// Which of the three products of a linear layer `y = x w^T` is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmKind {
    /// `out[r, :] = a[r, :] b[g]^T` for the rows r of group g.
    ///
    /// # Shape
    /// a: `[rows, k]`, b: `[groups, n, k]`, out: `[rows, n]`.
    Forward,
    /// `out[r, :] = a[r, :] b[g]`: the gradient of the layer's input.
    ///
    /// # Shape
    /// a: `[rows, n]`, b: `[groups, n, k]`, out: `[rows, k]`. The chain runs along n.
    Dgrad,
    /// `out[g] = a_g^T b_g`: the gradient of the layer's weight.
    ///
    /// # Shape
    /// a: `[rows, n]`, b: `[rows, k]`, out: `[groups, n, k]`. The chain runs along the group's rows. An empty group
    /// gives exact zeros (or leaves an accumulator as it is).
    Wgrad,
}

/// One factor of a product.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// f32 or bf16. With `gather` (u32), row r is row `gather[r]` of the tensor, a row of +0 where it has no such row.
    /// Only ragged operands gather: a in every kind, b in `Wgrad`.
    Plain {
        /// The values.
        values: &'a Tensor,
        /// Row indices.
        gather: Option<&'a Tensor>,
    },
    /// MXFP8: e4m3 codes with one ue8m0 scale for each 32 elements *along the chain*. With `gather` (u32, only a of
    /// `Forward` and `Dgrad`), row r is row `gather[r]` of codes and scales; where there is none, its codes are zero.
    ///
    /// # Shape
    /// Codes as the plain operand. Scales: the same with the chain's dimension divided by 32.
    Mxfp8 {
        /// e4m3.
        codes: &'a Tensor,
        /// ue8m0.
        scales: &'a Tensor,
        /// Row indices.
        gather: Option<&'a Tensor>,
    },
    /// FP8 blocks: e4m3 codes, f32 inverse scales. The chain's dimension is always the last one, so `Dgrad` takes
    /// b as `[groups, k, n]` and `Wgrad` takes a as `[n, rows]` and b as `[k, rows]`, as
    /// [`super::GroupQuantize`] writes them. `gather` is that of [`Operand::Mxfp8`].
    ///
    /// # Shape
    /// Inverse scales: a row operand `[m, ceil(chain / 128)]`, a weight `[groups, ceil(m / 128), ceil(chain / 128)]`, both
    /// operands of `Wgrad` `[chain / 128, m]`.
    Fp8Block {
        /// e4m3.
        codes: &'a Tensor,
        /// f32.
        scale_inv: &'a Tensor,
        /// Row indices.
        gather: Option<&'a Tensor>,
    },
    /// f32 values at the speed of bf16: each counts as the sum of three bf16 parts, see [`Split`]. The other factor is a
    /// plain one of bf16, or split, too.
    ///
    /// # Shape
    /// As the plain operand.
    Split {
        /// f32.
        values: &'a Tensor,
    },
}

impl<'a> Operand<'a> {
    /// A plain operand without gather.
    pub fn plain(values: &'a Tensor) -> Self {
        Operand::Plain { values, gather: None }
    }

    /// A plain operand whose row r is row `rows[r]` of `values`.
    pub fn gathered(values: &'a Tensor, rows: &'a Tensor) -> Self {
        Operand::Plain { values, gather: Some(rows) }
    }

    /// The values or codes.
    pub fn elements(&self) -> &'a Tensor {
        match self {
            Operand::Plain { values, .. } | Operand::Split { values } => values,
            Operand::Mxfp8 { codes, .. } | Operand::Fp8Block { codes, .. } => codes,
        }
    }

    fn tensors(&self) -> Vec<&'a Tensor> {
        let mut tensors = Vec::new();
        self.visit(FieldName::new("operand"), Access::Read, &mut |one| tensors.push(one.tensor));
        tensors
    }
}

impl<'a> Field<'a> for Operand<'a> {
    type Over<'b> = Operand<'b>;

    fn visit(self, field: FieldName, access: Access, visit: &mut dyn FnMut(Use<'a>)) {
        match self {
            Operand::Plain { values, gather } => {
                values.visit(field.within("values"), access, visit);
                gather.visit(field.within("gather"), access, visit);
            }
            Operand::Mxfp8 { codes, scales, gather } => {
                codes.visit(field.within("codes"), access, visit);
                scales.visit(field.within("scales"), access, visit);
                gather.visit(field.within("gather"), access, visit);
            }
            Operand::Fp8Block { codes, scale_inv, gather } => {
                codes.visit(field.within("codes"), access, visit);
                scale_inv.visit(field.within("scale_inv"), access, visit);
                gather.visit(field.within("gather"), access, visit);
            }
            Operand::Split { values } => values.visit(field.within("values"), access, visit),
        }
    }

    fn with_tensors<'b>(self, view: View<'a, 'b, '_>) -> Result<Operand<'b>> {
        Ok(match self {
            Operand::Plain { values, gather } => {
                Operand::Plain { values: view(values)?, gather: gather.with_tensors(view)? }
            }
            Operand::Mxfp8 { codes, scales, gather } => {
                Operand::Mxfp8 { codes: view(codes)?, scales: view(scales)?, gather: gather.with_tensors(view)? }
            }
            Operand::Fp8Block { codes, scale_inv, gather } => Operand::Fp8Block {
                codes: view(codes)?,
                scale_inv: view(scale_inv)?,
                gather: gather.with_tensors(view)?,
            },
            Operand::Split { values } => Operand::Split { values: view(values)? },
        })
    }
}

/// A product over ragged groups of rows.
///
/// # Shape
/// See [`GemmKind`]; `offsets` is u32 `[groups + 1]`, ascending from 0: group g has the rows
/// `offsets[g] .. offsets[g + 1]`. Rows from `offsets[groups]` on are neither read nor written. For quantized operands
/// of `Wgrad` the offsets are those of the padded buffer ([`super::ColumnBlocks::offsets`]). How offsets count that are
/// none of these: NUMERICS.md, "Indices from the device".
///
/// # Numerics
/// f32 operands follow the `F32` model. bf16 and MXFP8 operands follow the backend's model (MXFP8 elements become
/// `bf16(f32(code) * 2^(scale - 127))` under `F32` and `Hopper`). FP8 blocks: for each 128 along the chain a product
/// from zero under the model's e4m3 rule, then `acc = fma(part, scale_a * scale_b, acc)` from zero. Split operands: for
/// each 128 along the chain a product of bf16 from zero over the pairs of parts that count, then `acc = acc + part`
/// from zero. The f32 result is rounded once (nearest even) if `out` is bf16; with `accumulate`, `out = out + result`,
/// one f32 add.
///
/// # Errors
/// [`crate::Error::Argument`] names the operand and its dimensions.
#[derive(Clone, Copy, Debug)]
pub struct GroupedGemm<'a> {
    /// Which product.
    pub kind: GemmKind,
    /// The first factor.
    pub a: Operand<'a>,
    /// The second factor.
    pub b: Operand<'a>,
    /// Group offsets, u32.
    pub offsets: &'a Tensor,
    /// The result, f32 or bf16.
    pub out: &'a Tensor,
    /// Add to `out` (f32) instead of replacing it.
    pub accumulate: bool,
}

op!(GroupedGemm: read(a, b, offsets), update(out), value(kind, accumulate));

const OP: &str = "grouped_gemm";

queued!(GroupedGemm, named OP, by grouped_gemm);

impl<'a> GroupedGemm<'a> {
    /// What the offsets are multiples of: column-wise blocks begin anew with each group.
    pub fn offsets_block(&self) -> usize {
        match (self.kind, self.a) {
            (GemmKind::Wgrad, Operand::Mxfp8 { .. }) => 32,
            (GemmKind::Wgrad, Operand::Fp8Block { .. }) => 128,
            _ => 1,
        }
    }

    /// The product that the shapes of `out`, `a` and `offsets` make.
    pub fn product(&self) -> Product {
        let groups = self.offsets.len().saturating_sub(1);
        let (rows, n, k) = self.extents();
        self.kind.product(groups, rows, n, k)
    }

    /// Floating-point operations for so many rows in all groups together: two for each of them and each element of a weight.
    pub fn flops(&self, rows: usize) -> f64 {
        let (_, n, k) = self.extents();
        2.0 * rows as f64 * n as f64 * k as f64
    }

    /// Rows, and outputs and inputs of the layer, in the words of [`GemmKind`].
    fn extents(&self) -> (usize, usize, usize) {
        let last = |t: &Tensor, back: usize| t.shape().len().checked_sub(back).map_or(0, |i| t.shape()[i]);
        match self.kind {
            GemmKind::Forward => (self.out.rows(), self.out.cols(), self.a.elements().cols()),
            GemmKind::Dgrad => (self.out.rows(), self.a.elements().cols(), self.out.cols()),
            GemmKind::Wgrad => {
                let rows = match self.a {
                    Operand::Plain { gather: Some(index), .. } => index.len(),
                    Operand::Fp8Block { codes, .. } => codes.cols(),
                    _ => match self.b {
                        Operand::Plain { gather: Some(index), .. } => index.len(),
                        _ => self.a.elements().rows(),
                    },
                };
                (rows, last(self.out, 2), last(self.out, 1))
            }
        }
    }

    /// Checks the arguments.
    ///
    /// # Errors
    /// See the type.
    pub fn check(self, _caps: &Caps) -> Result<Checked<Self>> {
        let product = self.product();
        let meaning = match self.kind {
            GemmKind::Forward => ["[rows, k]", "[groups, n, k]", "[rows, n]"],
            GemmKind::Dgrad => ["[rows, n]", "[groups, n, k]", "[rows, k]"],
            GemmKind::Wgrad => ["[rows, n]", "[rows, k]", "[groups, n, k]"],
        };
        Arg::new(OP, "offsets", self.offsets).dtype(&[DType::U32])?;
        number(OP, "offsets", self.offsets.len() >= 2, "at least 2 entries (groups + 1)", self.offsets.len())?;
        let [a, b] = product.sides;
        check_operand("a", self.a, a, meaning[0])?;
        check_operand("b", self.b, b, meaning[1])?;
        Arg::new(OP, "out", self.out).dtype(FLOAT)?.shape(&product.out_shape(), meaning[2])?;
        number(
            OP,
            "out",
            !self.accumulate || self.out.dtype() == DType::F32,
            "F32 when accumulating",
            format_args!("{:?}", self.out),
        )?;
        let same = match (self.a, self.b) {
            (Operand::Plain { values: a, .. }, Operand::Plain { values: b, .. }) => a.dtype() == b.dtype(),
            (Operand::Plain { values, .. }, Operand::Split { .. })
            | (Operand::Split { .. }, Operand::Plain { values, .. }) => values.dtype() == DType::Bf16,
            (Operand::Mxfp8 { .. }, Operand::Mxfp8 { .. })
            | (Operand::Fp8Block { .. }, Operand::Fp8Block { .. })
            | (Operand::Split { .. }, Operand::Split { .. }) => true,
            _ => false,
        };
        number(
            OP,
            "b",
            same,
            "the format of a, or bf16 beside a split operand",
            format_args!("{:?} with a {:?}", self.b.elements(), self.a.elements()),
        )?;
        let mut inputs = self.a.tensors();
        inputs.extend(self.b.tensors());
        inputs.push(self.offsets);
        distinct(OP, "out", self.out, &inputs)?;
        Ok(Checked::new(self))
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let product = self.product();
        let Product { groups, m, n, k, sides, .. } = product;
        let offsets = Values::read(memory, self.offsets)?.words();
        let offsets = offsets::counted(&offsets, product.ragged_extent(), self.offsets_block());
        let [a, b] =
            [(self.a, sides[0]), (self.b, sides[1])].map(|(operand, side)| Factor::read(memory, operand, side));
        let (a, b, mut out) = (a?, b?, Values::read(memory, self.out)?);
        for group in 0..groups {
            let members = offsets[group]..offsets[group + 1];
            let (rows, chain, first) = match self.kind {
                GemmKind::Forward | GemmKind::Dgrad => (members, 0..k, 0),
                GemmKind::Wgrad => (0..m, members, group * m),
            };
            for (i, j) in rows.flat_map(|i| (0..n).map(move |j| (i, j))) {
                let at = (first + i) * n + j;
                let result = dot(memory.caps().numerics, &a.line(group, i, &chain), &b.line(group, j, &chain));
                if !self.accumulate {
                    out.set_float(at, result);
                } else if !chain.is_empty() {
                    out.set_float(at, out.float(at) + result);
                }
            }
        }
        out.write(memory)
    }

    /// Checks and queues.
    ///
    /// # Errors
    /// See the type; a failure of the device.
    pub fn run(self, backend: &dyn Backend) -> Result<()> {
        let _span = tracing::trace_span!(OP, kind = ?self.kind, a = ?self.a.elements(), out = ?self.out).entered();
        backend.grouped_gemm(&self.check(backend.caps())?)
    }
}

/// The shape of an operand, and of its scales.
fn check_operand(field: &'static str, operand: Operand<'_>, side: Side, meaning: &str) -> Result<()> {
    let plain = side.shape();
    match operand {
        Operand::Plain { values, gather: None } => {
            Arg::new(OP, field, values).dtype(FLOAT)?.shape(&plain, meaning)?;
        }
        Operand::Plain { values, gather: Some(index) } => {
            let ragged = side.ragged != Ragged::Stacked;
            number(OP, field, ragged, "no gather: only ragged operands are gathered", "a gather")?;
            Arg::new(OP, field, values).dtype(FLOAT)?;
            number(
                OP,
                field,
                values.shape().len() == 2 && values.cols() == plain[1],
                &format!("[source rows, {}] gathered to {meaning}", plain[1]),
                format_args!("{values:?}"),
            )?;
            Arg::new(OP, "gather", index).dtype(&[DType::U32])?.len(plain[0], "one source row for each row")?;
        }
        Operand::Mxfp8 { codes, scales, gather } => {
            let side = check_gather(field, codes, gather, side)?;
            Arg::new(OP, field, codes).dtype(&[DType::E4m3])?.shape(&side.shape(), meaning)?;
            number(OP, field, side.chain.is_multiple_of(32), "a multiple of 32 along the chain", side.chain)?;
            Arg::new(OP, "scales", scales)
                .dtype(&[DType::Ue8m0])?
                .shape(&side.mxfp8_scales().shape(), &format!("{meaning}, the chain divided by 32"))?;
        }
        Operand::Fp8Block { codes, scale_inv, gather } => {
            let side = check_gather(field, codes, gather, side)?;
            Arg::new(OP, field, codes)
                .dtype(&[DType::E4m3])?
                .shape(&side.chain_last().shape(), &format!("{meaning} with the chain's dimension last"))?;
            Arg::new(OP, "scale_inv", scale_inv).dtype(&[DType::F32])?.shape(
                &side.fp8_scales().shape(),
                "one for each 1x128 (rows), 128x1 (chain) or 128x128 (weights) block",
            )?;
        }
        Operand::Split { values } => {
            Arg::new(OP, field, values).dtype(&[DType::F32])?.shape(&plain, meaning)?;
        }
    }
    Ok(())
}

/// The side that a quantized operand stores: as many rows as there are to gather from.
fn check_gather(field: &'static str, codes: &Tensor, gather: Option<&Tensor>, side: Side) -> Result<Side> {
    let Some(index) = gather else { return Ok(side) };
    number(OP, field, side.ragged == Ragged::Rows, "no gather: blocks run along what it would gather", "a gather")?;
    Arg::new(OP, "gather", index).dtype(&[DType::U32])?.len(side.rows, "one source row for each row")?;
    Ok(Side { rows: codes.rows(), ..side })
}

/// A factor, read for the specification.
enum Factor<'a> {
    Plain { side: Side, values: Values<'a>, gather: Option<Values<'a>> },
    Mxfp8 { side: Side, codes: Values<'a>, scales: Values<'a>, gather: Option<Values<'a>> },
    Fp8Block { side: Side, codes: Values<'a>, scale_inv: Values<'a>, gather: Option<Values<'a>> },
    Split { side: Side, values: Values<'a> },
}

/// The elements of one row (or column) of an output along its chain, with the scale of each block of a quantized factor.
enum Line {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    Mxfp8(Vec<u8>, Vec<u8>),
    Fp8Block(Vec<u8>, Vec<f32>),
    /// A plain factor is its own only part.
    Split(Vec<Vec<u16>>),
}

impl<'a> Factor<'a> {
    fn read(memory: &dyn Backend, operand: Operand<'a>, side: Side) -> Result<Factor<'a>> {
        let read = |tensor| Values::read(memory, tensor);
        Ok(match operand {
            Operand::Plain { values, gather } => {
                Factor::Plain { side, values: read(values)?, gather: Values::read_opt(memory, gather)? }
            }
            Operand::Mxfp8 { codes, scales, gather } => Factor::Mxfp8 {
                side: Side { rows: gather.map_or(side.rows, |_| codes.rows()), ..side },
                codes: read(codes)?,
                scales: read(scales)?,
                gather: Values::read_opt(memory, gather)?,
            },
            Operand::Fp8Block { codes, scale_inv, gather } => Factor::Fp8Block {
                side: Side { rows: gather.map_or(side.rows, |_| codes.rows()), ..side.chain_last() },
                codes: read(codes)?,
                scale_inv: read(scale_inv)?,
                gather: Values::read_opt(memory, gather)?,
            },
            Operand::Split { values } => Factor::Split { side, values: read(values)? },
        })
    }

    /// Row i of a group's factor along a part of the chain.
    fn line(&self, group: usize, i: usize, chain: &Range<usize>) -> Line {
        match self {
            Factor::Plain { side, values, gather } => {
                let (sources, chain) = (values.rows(), chain.clone());
                let gather = gather.as_ref();
                // A gathered row that is not there is a row of +0.
                let place = |t: usize| match side.ragged {
                    Ragged::Rows => source(gather, i, sources).map(|row| side.place(group, row, t)),
                    Ragged::Chain => source(gather, t, sources).map(|row| side.place(group, i, row)),
                    Ragged::Stacked => Some(side.place(group, i, t)),
                };
                match values.dtype() {
                    DType::F32 => Line::F32(chain.map(|t| place(t).map_or(0.0, |at| values.float(at))).collect()),
                    _ => Line::Bf16(chain.map(|t| place(t).map_or(0, |at| values.bf16(at))).collect()),
                }
            }
            Factor::Mxfp8 { side, codes, scales, gather } => {
                let row = source(gather.as_ref(), i, side.rows);
                let code = |t| row.map_or(0, |row| codes.bytes()[side.place(group, row, t)]);
                let scale = |t| row.map_or(0, |row| scales.bytes()[side.mxfp8_scales().place(group, row, t / 32)]);
                Line::Mxfp8(chain.clone().map(code).collect(), chain.clone().step_by(32).map(scale).collect())
            }
            Factor::Fp8Block { side, codes, scale_inv, gather } => {
                let row = source(gather.as_ref(), i, side.rows);
                let code = |t| row.map_or(0, |row| codes.bytes()[side.place(group, row, t)]);
                // The scales of a weight also span 128 of its rows.
                let span = if side.ragged == Ragged::Stacked { 128 } else { 1 };
                let scale =
                    |t| row.map_or(0.0, |row| scale_inv.float(side.fp8_scales().place(group, row / span, t / 128)));
                Line::Fp8Block(chain.clone().map(code).collect(), chain.clone().step_by(128).map(scale).collect())
            }
            Factor::Split { side, values } => {
                let parts = chain.clone().map(|t| Split::of(values.float(side.place(group, i, t))).parts());
                let part = |k: usize| parts.clone().map(|parts| parts[k]).collect();
                Line::Split((0..3).map(part).collect())
            }
        }
    }
}

/// The row that is gathered as row `i`; itself without a gather, none if there is no such row.
fn source(gather: Option<&Values<'_>>, i: usize, sources: usize) -> Option<usize> {
    gather.map_or(Some(i), |gather| Some(gather.word(i) as usize).filter(|&source| source < sources))
}

/// One element of the output: a chain from zero.
fn dot(model: NumericModel, a: &Line, b: &Line) -> f32 {
    match (a, b) {
        (Line::F32(a), Line::F32(b)) => mma::dot_f32(a, b, 0.0),
        (Line::Bf16(a), Line::Bf16(b)) => mma::dot_bf16(model, a, b, 0.0),
        (Line::Mxfp8(a, a_scales), Line::Mxfp8(b, b_scales)) if model == NumericModel::Blackwell => {
            mma::dot_mxfp8(a, a_scales, b, b_scales, 0.0)
        }
        (Line::Mxfp8(a, a_scales), Line::Mxfp8(b, b_scales)) => {
            let values = |codes: &[u8], scales: &[u8]| -> Vec<u16> {
                let value = |(t, &code): (usize, &u8)| e4m3::to_f32(code) * ue8m0::to_f32(scales[t / 32]);
                codes.iter().enumerate().map(value).map(bf16::from_f32).collect()
            };
            mma::dot_bf16(model, &values(a, a_scales), &values(b, b_scales), 0.0)
        }
        (Line::Fp8Block(a, a_scales), Line::Fp8Block(b, b_scales)) => {
            let blocks = a.chunks(128).zip(b.chunks(128)).zip(a_scales.iter().zip(b_scales));
            blocks.fold(0.0, |acc, ((a, b), (a_scale, b_scale))| {
                mma::dot_e4m3(model, a, b, 0.0).mul_add(a_scale * b_scale, acc)
            })
        }
        (Line::Split(a), Line::Split(b)) => split::dot(model, a, b),
        (Line::Split(a), Line::Bf16(b)) => split::dot(model, a, std::slice::from_ref(b)),
        (Line::Bf16(a), Line::Split(b)) => split::dot(model, std::slice::from_ref(a), b),
        _ => unreachable!("the factors of a checked product have one format, or are split and bf16"),
    }
}
