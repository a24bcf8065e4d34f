//! Block quantization of ragged groups of rows. NUMERICS.md, "Block formats".

use std::ops::Range;

use super::arguments::{op, queued, tensors};
use super::{Arg, Checked, DType, FLOAT, Values, distinct, number, offsets};
use crate::backend::{Backend, Caps};
use crate::error::Result;
use crate::launch::word;
use crate::numerics::blocks::{self, Format, Fp8Block, Mxfp8, Nvfp4};
use crate::numerics::e4m3;
use crate::tensor::Tensor;

/// A block format and the options that change its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// Blocks of 32 e4m3 elements with a ue8m0 scale.
    Mxfp8 {
        /// Round the shared exponent down and saturate the largest elements (the OCP rule) instead of up (the default
        /// here: nothing saturates).
        floor: bool,
    },
    /// Blocks of 1x128 (square: 128x128) e4m3 elements with an f32 inverse scale.
    Fp8Block {
        /// Keep the f32 scale instead of rounding it down to a power of two.
        f32_scale: bool,
    },
    /// Blocks of 1x16 (square: 16x16) e2m1 elements with an e4m3 scale, and one f32 amax for the tensor.
    Nvfp4 {
        /// Stochastic rounding with this Philox key (64 bits) and counter stream; nearest even if absent.
        stochastic: Option<(u64, u32)>,
    },
}

impl BlockFormat {
    /// Elements along a block.
    pub const fn block(self) -> usize {
        match self {
            BlockFormat::Mxfp8 { .. } => 32,
            BlockFormat::Fp8Block { .. } => 128,
            BlockFormat::Nvfp4 { .. } => 16,
        }
    }
}

/// Where the row-wise result goes: blocks run along the columns.
///
/// # Shape
/// codes as `x` (`E2m1x2`: half the columns); scales as `x` with the columns divided by the block, rounded up (FP8
/// blocks with `square`: the rows of each matrix too).
#[derive(Clone, Copy, Debug)]
pub struct RowBlocks<'a> {
    /// e4m3, or e2m1x2.
    pub codes: &'a Tensor,
    /// ue8m0 (MXFP8), f32 inverse scales (FP8 blocks), e4m3 (NVFP4).
    pub scales: &'a Tensor,
}

tensors!(RowBlocks: tensor(codes, scales));

/// Where the column-wise result goes: blocks run along the rows and never span two groups. Each group starts at a
/// multiple of the block in the result; the rows that pad a group hold zero codes.
///
/// # Shape
/// With `padded` = the result's capacity in rows, a multiple of the block, at least
/// [`GroupQuantize::padded_rows`]. MXFP8: codes `[padded, cols]`, scales `[padded / 32, cols]`. FP8 blocks: codes,
/// transposed, `[cols, padded]`, scales `[padded / 128, cols]`. For stacked matrices `[groups, n, k]` (no padding, n a
/// multiple of 32 for MXFP8): MXFP8 codes `[groups, n, k]`, scales `[groups, n / 32, k]`; FP8 blocks (square only) codes
/// `[groups, k, n]`, scales `[groups, ceil(k / 128), ceil(n / 128)]`.
#[derive(Clone, Copy, Debug)]
pub struct ColumnBlocks<'a> {
    /// As in [`RowBlocks`].
    pub codes: &'a Tensor,
    /// As in [`RowBlocks`].
    pub scales: &'a Tensor,
    /// u32 `[groups + 1]`, written: the groups' offsets in the padded result. None for stacked matrices.
    pub offsets: Option<&'a Tensor>,
}

tensors!(ColumnBlocks: tensor(codes, scales, offsets));

/// Quantizes ragged groups of rows, or a stack of matrices, row-wise, column-wise or both in one pass.
///
/// # Shape
/// x: f32 or bf16, `[rows, cols]` with u32 offsets `[groups + 1]` (as those of [`super::GroupedGemm`]), or
/// `[groups, n, k]` without. `square` needs stacked matrices. With `gather` (u32 `[rows]`, only with offsets) row r is row
/// `gather[r]` of x `[source rows, cols]`, a row of +0 where there is none. Column-wise NVFP4 is not defined. amax: f32
/// `[1]`, written, for NVFP4 only.
///
/// # Numerics
/// `NUMERICS.md`, "Block formats". Both results come from the unquantized input.
///
/// # Errors
/// [`crate::Error::Argument`] names the field, e.g. a shape whose columns are not a multiple of 32 under MXFP8.
#[derive(Clone, Copy, Debug)]
pub struct GroupQuantize<'a> {
    /// The values.
    pub x: &'a Tensor,
    /// The row of `x` that each row is.
    pub gather: Option<&'a Tensor>,
    /// Group offsets; None for stacked matrices.
    pub offsets: Option<&'a Tensor>,
    /// The format.
    pub format: BlockFormat,
    /// One scale for each square block of a stacked matrix, so that both results hold the same codes. MXFP8 and NVFP4
    /// store it for each of the block's rows (column-wise: columns), as products expect it.
    pub square: bool,
    /// The row-wise result.
    pub row: Option<RowBlocks<'a>>,
    /// The column-wise result.
    pub column: Option<ColumnBlocks<'a>>,
    /// The tensor's amax (NVFP4).
    pub amax: Option<&'a Tensor>,
}

op!(GroupQuantize: read(x, gather, offsets), write(row, column, amax), value(format, square));

const OP: &str = "group_quantize";

queued!(GroupQuantize, named OP, by group_quantize);

impl<'a> GroupQuantize<'a> {
    /// Rows that a column-wise result needs in the worst case for `rows` rows in `groups` groups.
    pub fn padded_rows(format: BlockFormat, rows: usize, groups: usize) -> usize {
        let block = format.block();
        (rows + groups * (block - 1)) / block * block
    }

    /// Rows that are quantized (at least as many as there are).
    pub fn rows(&self) -> usize {
        self.gather.map_or(self.x.rows(), Tensor::len)
    }

    /// Checks the arguments.
    ///
    /// # Errors
    /// See the type.
    pub fn check(self, _caps: &Caps) -> Result<Checked<Self>> {
        let x = self.x;
        let block = self.format.block();
        let nvfp4 = matches!(self.format, BlockFormat::Nvfp4 { .. });
        let (code, scale) = match self.format {
            BlockFormat::Mxfp8 { .. } => (DType::E4m3, DType::Ue8m0),
            BlockFormat::Fp8Block { .. } => (DType::E4m3, DType::F32),
            BlockFormat::Nvfp4 { .. } => (DType::E2m1x2, DType::E4m3),
        };
        Arg::new(OP, "x", x).dtype(FLOAT)?;
        let stacked = self.offsets.is_none();
        let dims = if stacked { 3 } else { 2 };
        number(
            OP,
            "x",
            x.shape().len() == dims,
            if stacked { "[groups, n, k] without offsets" } else { "[rows, cols] with offsets" },
            format_args!("{x:?}"),
        )?;
        if let Some(offsets) = self.offsets {
            Arg::new(OP, "offsets", offsets).dtype(&[DType::U32])?;
            number(OP, "offsets", offsets.len() >= 2, "at least 2 entries (groups + 1)", offsets.len())?;
        }
        if let Some(gather) = self.gather {
            Arg::new(OP, "gather", gather).dtype(&[DType::U32])?;
            number(
                OP,
                "gather",
                !stacked && gather.shape().len() == 1,
                "[rows], with offsets",
                format_args!("{gather:?}"),
            )?;
        }
        number(OP, "square", stacked || !self.square, "false for ragged rows", self.square)?;
        number(OP, "amax", self.amax.is_some() == nvfp4, "given for NVFP4 and only there", self.amax.is_some())?;
        if let Some(amax) = self.amax {
            Arg::new(OP, "amax", amax).dtype(&[DType::F32])?.len(1, "one for the tensor")?;
        }
        let cols = x.cols();
        if let Some(row) = self.row {
            if !matches!(self.format, BlockFormat::Fp8Block { .. }) {
                number(OP, "x", cols.is_multiple_of(block), &format!("a multiple of {block} columns"), cols)?;
            }
            let mut shape = x.shape().to_vec();
            if self.gather.is_some() {
                shape[0] = self.rows();
            }
            let mut scales = shape.clone();
            scales[dims - 1] = cols.div_ceil(block);
            if self.square && matches!(self.format, BlockFormat::Fp8Block { .. }) {
                scales[1] = shape[1].div_ceil(block);
            }
            if nvfp4 {
                shape[dims - 1] /= 2;
            }
            Arg::new(OP, "row.codes", row.codes).dtype(&[code])?.shape(&shape, "as x")?;
            Arg::new(OP, "row.scales", row.scales).dtype(&[scale])?.shape(&scales, "as x, in blocks")?;
        }
        if let Some(column) = self.column {
            self.check_column(column, code, scale)?;
        }
        let outputs = [
            self.row.map(|r| r.codes),
            self.row.map(|r| r.scales),
            self.column.map(|c| c.codes),
            self.column.map(|c| c.scales),
            self.column.and_then(|c| c.offsets),
            self.amax,
        ];
        for (i, out) in outputs.iter().enumerate() {
            let Some(out) = out else { continue };
            let mut others: Vec<&Tensor> = outputs[i + 1..].iter().flatten().copied().collect();
            others.push(x);
            others.extend(self.gather);
            others.extend(self.offsets);
            distinct(OP, "output", out, &others)?;
        }
        Ok(Checked::new(self))
    }

    fn check_column(&self, column: ColumnBlocks<'_>, code: DType, scale: DType) -> Result<()> {
        let block = self.format.block();
        let (codes, scales) = (column.codes, column.scales);
        let cols = self.x.cols();
        Arg::new(OP, "column.codes", codes).dtype(&[code])?;
        Arg::new(OP, "column.scales", scales).dtype(&[scale])?;
        number(
            OP,
            "column.offsets",
            column.offsets.is_some() == self.offsets.is_some(),
            "given exactly for ragged rows",
            column.offsets.is_some(),
        )?;
        let transposed = matches!(self.format, BlockFormat::Fp8Block { .. });
        number(
            OP,
            "column",
            !matches!(self.format, BlockFormat::Nvfp4 { .. }),
            "absent under NVFP4 (no column-wise NVFP4 is defined)",
            "given",
        )?;
        match (self.offsets, column.offsets) {
            (Some(offsets), Some(out)) => {
                Arg::new(OP, "column.offsets", out).dtype(&[DType::U32])?.len(offsets.len(), "groups + 1")?;
                let padded = if transposed { codes.cols() } else { codes.rows() };
                let least = Self::padded_rows(self.format, self.rows(), offsets.len() - 1);
                number(
                    OP,
                    "column.codes",
                    padded >= least && padded.is_multiple_of(block),
                    &format!("at least {least} rows, a multiple of {block}"),
                    padded,
                )?;
                let (c, s) = if transposed {
                    ([cols, padded], [padded / block, cols])
                } else {
                    ([padded, cols], [padded / block, cols])
                };
                Arg::new(OP, "column.codes", codes).shape(&c, "padded rows and columns")?;
                Arg::new(OP, "column.scales", scales).shape(&s, "padded rows in blocks, and columns")?;
            }
            _ => {
                let [groups, n, k] = [self.x.shape()[0], self.x.shape()[1], self.x.shape()[2]];
                if transposed {
                    number(OP, "square", self.square, "true for column-wise FP8 blocks of matrices", self.square)?;
                    Arg::new(OP, "column.codes", codes).shape(&[groups, k, n], "[groups, k, n]")?;
                    Arg::new(OP, "column.scales", scales)
                        .shape(&[groups, k.div_ceil(block), n.div_ceil(block)], "[groups, k, n] in blocks")?;
                } else {
                    number(OP, "x", n.is_multiple_of(block), &format!("a multiple of {block} rows a matrix"), n)?;
                    Arg::new(OP, "column.codes", codes).shape(&[groups, n, k], "[groups, n, k]")?;
                    Arg::new(OP, "column.scales", scales).shape(&[groups, n / block, k], "[groups, n in blocks, k]")?;
                }
            }
        }
        Ok(())
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let mut x = Values::read(memory, self.x)?.floats();
        if let Some(gather) = Values::read_opt(memory, self.gather)? {
            let cols = self.x.cols();
            let row = |&row: &u32| x.get(row as usize * cols..(row as usize + 1) * cols);
            x = gather.words().iter().flat_map(|r| row(r).map_or(vec![0.0; cols], <[f32]>::to_vec)).collect();
        }
        let groups = match Values::read_opt(memory, self.offsets)? {
            Some(offsets) => {
                let counted = offsets::counted(&offsets.words(), self.rows(), 1);
                counted.windows(2).map(|of| of[0]..of[1]).collect()
            }
            None => {
                let n = self.x.shape()[1];
                (0..self.x.shape()[0]).map(|g| g * n..(g + 1) * n).collect()
            }
        };
        let input = Input { x, groups, cols: self.x.cols() };
        match self.format {
            BlockFormat::Mxfp8 { floor } => self.quantize(memory, &input, &Mxfp8 { floor }),
            BlockFormat::Fp8Block { f32_scale } => self.quantize(memory, &input, &Fp8Block { f32_scale }),
            BlockFormat::Nvfp4 { stochastic } => {
                let amax = blocks::amax(&input.x[..input.rows() * input.cols]);
                if let Some(out) = self.amax {
                    let mut out = Values::read(memory, out)?;
                    out.set_float(0, amax);
                    out.write(memory)?;
                }
                self.quantize(memory, &input, &Nvfp4::new(amax, stochastic))
            }
        }
    }

    fn quantize<F: Format>(&self, memory: &dyn Backend, input: &Input, format: &F) -> Result<()> {
        if let Some(RowBlocks { codes, scales }) = self.row {
            let (mut codes, mut scales) = (Values::read(memory, codes)?, Values::read(memory, scales)?);
            self.along_rows(input, format, &mut codes, &mut scales);
            codes.write(memory)?;
            scales.write(memory)?;
        }
        if let Some(ColumnBlocks { codes, scales, offsets }) = self.column {
            let (mut codes, mut scales) = (Values::read(memory, codes)?, Values::read(memory, scales)?);
            let mut offsets = Values::read_opt(memory, offsets)?;
            self.along_columns(input, format, &mut codes, &mut scales, offsets.as_mut());
            codes.write(memory)?;
            scales.write(memory)?;
            offsets.map_or(Ok(()), |offsets| offsets.write(memory))?;
        }
        Ok(())
    }

    /// One scale for each square, instead of one for each of its rows or columns.
    fn scales_of_squares(&self) -> bool {
        self.square && matches!(self.format, BlockFormat::Fp8Block { .. })
    }

    fn along_rows<F: Format>(&self, input: &Input, format: &F, codes: &mut Values<'_>, scales: &mut Values<'_>) {
        let (cols, across) = (input.cols, input.cols.div_ceil(F::BLOCK));
        for (row, block) in (0..input.rows()).flat_map(|row| (0..across).map(move |block| (row, block))) {
            let at = block * F::BLOCK..cols.min((block + 1) * F::BLOCK);
            let amax = match self.square {
                true => input.amax_of_square(row, at.start, F::BLOCK),
                false => input.amax(row..row + 1, at.clone()),
            };
            let (scale, factor) = format.scale(amax);
            let place = if self.scales_of_squares() {
                let n = self.x.shape()[1];
                (row / n * n.div_ceil(F::BLOCK) + row % n / F::BLOCK) * across + block
            } else {
                row * across + block
            };
            set_scale(scales, place, &scale);
            let at = row * cols + at.start..row * cols + at.end;
            let bytes = at.start / F::PER_BYTE..at.end / F::PER_BYTE;
            format.encode(&input.x[at], factor, (row * across + block) as u64, &mut codes.bytes_mut()[bytes]);
        }
    }

    fn along_columns<F: Format>(
        &self,
        input: &Input,
        format: &F,
        codes: &mut Values<'_>,
        scales: &mut Values<'_>,
        mut offsets: Option<&mut Values<'_>>,
    ) {
        let (cols, block) = (input.cols, F::BLOCK);
        let transposed = matches!(self.format, BlockFormat::Fp8Block { .. });
        let ragged = offsets.is_some();
        // Rows of a matrix of the result: one of each group, or one of all groups, each padded to whole blocks.
        let matrices = if ragged { 1 } else { input.groups.len() };
        let height = codes.len() / (matrices * cols).max(1);
        let (mut start, down) = (0, height.div_ceil(block));
        for (g, group) in input.groups.iter().enumerate() {
            let matrix = if ragged { 0 } else { g };
            if let Some(offsets) = &mut offsets {
                offsets.set_word(g, word(start));
            }
            for (first, col) in group.clone().step_by(block).flat_map(|first| (0..cols).map(move |col| (first, col))) {
                let rows = first..group.end.min(first + block);
                let amax = match self.square {
                    true => input.amax_of_square(first, col, block),
                    false => input.amax(rows.clone(), col..col + 1),
                };
                let (scale, factor) = format.scale(amax);
                let to = start + first - group.start;
                let place = match (transposed, self.square) {
                    (true, true) => (matrix * cols.div_ceil(block) + col / block) * down + to / block,
                    (_, false) | (false, _) => (matrix * down + to / block) * cols + col,
                };
                set_scale(scales, place, &scale);
                for i in 0..if ragged { block } else { rows.len() } {
                    let row = first + i;
                    let code = if row < rows.end { e4m3::from_f32(input.x[row * cols + col] * factor) } else { 0 };
                    let place = match transposed {
                        true => (matrix * cols + col) * height + to + i,
                        false => (matrix * height + to + i) * cols + col,
                    };
                    codes.bytes_mut()[place] = code;
                }
            }
            start += if ragged { group.len().next_multiple_of(block) } else { 0 };
        }
        if let Some(offsets) = offsets {
            offsets.set_word(input.groups.len(), word(start));
        }
    }

    /// Checks and queues.
    ///
    /// # Errors
    /// See the type; a failure of the device.
    pub fn run(self, backend: &dyn Backend) -> Result<()> {
        let _span = tracing::trace_span!(OP, format = ?self.format, x = ?self.x).entered();
        backend.group_quantize(&self.check(backend.caps())?)
    }
}

/// What the specification reads.
struct Input {
    x: Vec<f32>,
    cols: usize,
    /// The rows of each group.
    groups: Vec<Range<usize>>,
}

impl Input {
    /// Rows in all groups.
    fn rows(&self) -> usize {
        self.groups.last().map_or(0, |last| last.end)
    }

    fn amax(&self, rows: Range<usize>, cols: Range<usize>) -> f32 {
        rows.map(|r| blocks::amax(&self.x[r * self.cols..][cols.clone()])).fold(0.0, f32::max)
    }

    /// The amax of the square around an element, within its matrix.
    fn amax_of_square(&self, row: usize, col: usize, block: usize) -> f32 {
        let n = self.rows() / self.groups.len();
        let (matrix, down, across) = (row / n * n, row % n / block * block, col / block * block);
        self.amax(matrix + down..matrix + n.min(down + block), across..self.cols.min(across + block))
    }
}

fn set_scale<S: bytemuck::NoUninit>(scales: &mut Values<'_>, place: usize, scale: &S) {
    scales.bytes_mut()[place * size_of::<S>()..(place + 1) * size_of::<S>()].copy_from_slice(bytemuck::bytes_of(scale));
}
