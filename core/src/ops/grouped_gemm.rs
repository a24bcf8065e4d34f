//! Matrix products over ragged groups of rows. NUMERICS.md, "Matrix products".
//!
//! The rows of a group are the tokens of one expert. One call covers every group; the group sizes stay on the device.
//! A dense product is a grouped product with one group.

use super::arguments::{Access, Field, FieldName, Use, View, op, queued};
use super::{Arg, Checked, DType, FLOAT, distinct, number};
use crate::backend::{Backend, Caps};
use crate::error::Result;
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
    /// f32 or bf16. With `gather` (u32), row r is row `gather[r]` of the tensor; [`super::NONE`] does not occur within a
    /// group. Only ragged operands gather: a in every kind, b in `Wgrad`.
    Plain {
        /// The values.
        values: &'a Tensor,
        /// Row indices.
        gather: Option<&'a Tensor>,
    },
    /// MXFP8: e4m3 codes with one ue8m0 scale for each 32 elements *along the chain*.
    ///
    /// # Shape
    /// Codes as the plain operand. Scales: the same with the chain's dimension divided by 32.
    Mxfp8 {
        /// e4m3.
        codes: &'a Tensor,
        /// ue8m0.
        scales: &'a Tensor,
    },
    /// FP8 blocks: e4m3 codes, f32 inverse scales. The chain's dimension is always the last one, so `Dgrad` takes
    /// b as `[groups, k, n]` and `Wgrad` takes a as `[n, rows]` and b as `[k, rows]`, as
    /// [`super::GroupQuantize`] writes them.
    ///
    /// # Shape
    /// Inverse scales: a row operand `[m, ceil(chain / 128)]`, a weight `[groups, ceil(m / 128), ceil(chain / 128)]`.
    Fp8Block {
        /// e4m3.
        codes: &'a Tensor,
        /// f32.
        scale_inv: &'a Tensor,
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
            Operand::Plain { values, .. } => values,
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
            Operand::Mxfp8 { codes, scales } => {
                codes.visit(field.within("codes"), access, visit);
                scales.visit(field.within("scales"), access, visit);
            }
            Operand::Fp8Block { codes, scale_inv } => {
                codes.visit(field.within("codes"), access, visit);
                scale_inv.visit(field.within("scale_inv"), access, visit);
            }
        }
    }

    fn with_tensors<'b>(self, view: View<'a, 'b, '_>) -> Result<Operand<'b>> {
        Ok(match self {
            Operand::Plain { values, gather } => {
                Operand::Plain { values: view(values)?, gather: gather.with_tensors(view)? }
            }
            Operand::Mxfp8 { codes, scales } => Operand::Mxfp8 { codes: view(codes)?, scales: view(scales)? },
            Operand::Fp8Block { codes, scale_inv } => {
                Operand::Fp8Block { codes: view(codes)?, scale_inv: view(scale_inv)? }
            }
        })
    }
}

/// A product over ragged groups of rows.
///
/// # Shape
/// See [`GemmKind`]; `offsets` is u32 `[groups + 1]`, ascending from 0: group g has the rows
/// `offsets[g] .. offsets[g + 1]`. Rows from `offsets[groups]` on are neither read nor written. For quantized operands
/// of `Wgrad` the offsets are those of the padded buffer ([`super::ColumnBlocks::offsets`]).
///
/// # Numerics
/// f32 operands follow the `F32` model. bf16 and MXFP8 operands follow the backend's model (MXFP8 elements become
/// `bf16(f32(code) * 2^(scale - 127))` under `F32` and `Hopper`). FP8 blocks: for each 128 along the chain a product
/// from zero under the model's e4m3 rule, then `acc = fma(part, scale_a * scale_b, acc)` from zero. The f32 result is
/// rounded once (nearest even) if `out` is bf16; with `accumulate`, `out = out + result`, one f32 add.
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

/// The extents of a checked product. `m x n` outputs per group with a chain of `k` terms, in the words of a BLAS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    /// Number of groups.
    pub groups: usize,
    /// Rows that the ragged operand's index space holds (an upper bound of `offsets[groups]`).
    pub rows: usize,
    /// Columns of the layer's output (`n` of [`GemmKind`]).
    pub n: usize,
    /// Columns of the layer's input (`k` of [`GemmKind`]).
    pub k: usize,
}

const OP: &str = "grouped_gemm";

queued!(GroupedGemm, named OP, by grouped_gemm);

impl<'a> GroupedGemm<'a> {
    /// Groups, rows, n and k, as the shapes of `out`, `a` and `offsets` give them.
    pub fn extents(&self) -> Extents {
        let groups = self.offsets.len().saturating_sub(1);
        let last = |t: &Tensor, back: usize| t.shape().len().checked_sub(back).map_or(0, |i| t.shape()[i]);
        match self.kind {
            GemmKind::Forward => {
                Extents { groups, rows: self.out.rows(), n: self.out.cols(), k: self.a.elements().cols() }
            }
            GemmKind::Dgrad => {
                Extents { groups, rows: self.out.rows(), n: self.a.elements().cols(), k: self.out.cols() }
            }
            GemmKind::Wgrad => {
                let rows = match self.a {
                    Operand::Plain { gather: Some(index), .. } => index.len(),
                    Operand::Fp8Block { codes, .. } => codes.cols(),
                    _ => match self.b {
                        Operand::Plain { gather: Some(index), .. } => index.len(),
                        _ => self.a.elements().rows(),
                    },
                };
                Extents { groups, rows, n: last(self.out, 2), k: last(self.out, 1) }
            }
        }
    }

    /// Checks the arguments.
    ///
    /// # Errors
    /// See the type.
    pub fn check(self, _caps: &Caps) -> Result<Checked<Self>> {
        let Extents { groups, rows, n, k } = self.extents();
        let meaning = match self.kind {
            GemmKind::Forward => ["[rows, k]", "[groups, n, k]", "[rows, n]"],
            GemmKind::Dgrad => ["[rows, n]", "[groups, n, k]", "[rows, k]"],
            GemmKind::Wgrad => ["[rows, n]", "[rows, k]", "[groups, n, k]"],
        };
        Arg::new(OP, "offsets", self.offsets).dtype(&[DType::U32])?;
        number(OP, "offsets", self.offsets.len() >= 2, "at least 2 entries (groups + 1)", self.offsets.len())?;
        let (a_plain, b_plain, out): (&[usize], &[usize], &[usize]) = match self.kind {
            GemmKind::Forward => (&[rows, k], &[groups, n, k], &[rows, n]),
            GemmKind::Dgrad => (&[rows, n], &[groups, n, k], &[rows, k]),
            GemmKind::Wgrad => (&[rows, n], &[rows, k], &[groups, n, k]),
        };
        // The dimension of each plain operand along which the chain runs.
        let (a_chain, b_chain) = match self.kind {
            GemmKind::Forward => (1, 2),
            GemmKind::Dgrad => (1, 1),
            GemmKind::Wgrad => (0, 0),
        };
        check_operand("a", self.a, a_plain, a_chain, meaning[0], true)?;
        check_operand("b", self.b, b_plain, b_chain, meaning[1], self.kind == GemmKind::Wgrad)?;
        Arg::new(OP, "out", self.out).dtype(FLOAT)?.shape(out, meaning[2])?;
        number(
            OP,
            "out",
            !self.accumulate || self.out.dtype() == DType::F32,
            "F32 when accumulating",
            format_args!("{:?}", self.out),
        )?;
        let same = match (self.a, self.b) {
            (Operand::Plain { values: a, .. }, Operand::Plain { values: b, .. }) => a.dtype() == b.dtype(),
            (Operand::Mxfp8 { .. }, Operand::Mxfp8 { .. }) | (Operand::Fp8Block { .. }, Operand::Fp8Block { .. }) => {
                true
            }
            _ => false,
        };
        number(
            OP,
            "b",
            same,
            "the format of a",
            format_args!("{:?} with a {:?}", self.b.elements(), self.a.elements()),
        )?;
        let mut inputs = self.a.tensors();
        inputs.extend(self.b.tensors());
        inputs.push(self.offsets);
        distinct(OP, "out", self.out, &inputs)?;
        Ok(Checked::new(self))
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

/// `plain`: the operand's shape without quantization; `chain`: its dimension along which the product sums.
fn check_operand(
    field: &'static str,
    operand: Operand<'_>,
    plain: &[usize],
    chain: usize,
    meaning: &str,
    ragged: bool,
) -> Result<()> {
    let blocks = |len: usize, block: usize| len.div_ceil(block);
    match operand {
        Operand::Plain { values, gather: None } => {
            Arg::new(OP, field, values).dtype(FLOAT)?.shape(plain, meaning)?;
        }
        Operand::Plain { values, gather: Some(index) } => {
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
        Operand::Mxfp8 { codes, scales } => {
            Arg::new(OP, field, codes).dtype(&[DType::E4m3])?.shape(plain, meaning)?;
            number(OP, field, plain[chain].is_multiple_of(32), "a multiple of 32 along the chain", plain[chain])?;
            let mut shape = plain.to_vec();
            shape[chain] /= 32;
            Arg::new(OP, "scales", scales)
                .dtype(&[DType::Ue8m0])?
                .shape(&shape, &format!("{meaning}, the chain divided by 32"))?;
        }
        Operand::Fp8Block { codes, scale_inv } => {
            // The chain's dimension moves to the end.
            let mut shape = plain.to_vec();
            let length = shape.remove(chain);
            shape.push(length);
            Arg::new(OP, field, codes)
                .dtype(&[DType::E4m3])?
                .shape(&shape, &format!("{meaning} with the chain's dimension last"))?;
            let last = shape.len() - 1;
            shape[last] = blocks(length, 128);
            if shape.len() == 3 {
                shape[1] = blocks(shape[1], 128);
            }
            Arg::new(OP, "scale_inv", scale_inv)
                .dtype(&[DType::F32])?
                .shape(&shape, "one for each 1x128 (rows) or 128x128 (weights) block")?;
        }
    }
    Ok(())
}
