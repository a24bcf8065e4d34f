//! The operands of products under a precision recipe: plain values, or blocks of codes along each product's chain.
//! NUMERICS.md, "Block formats".
//!
//! Of rows (activations and gradients) the products along the columns take row-wise blocks, and the weight gradients
//! column-wise ones, which start afresh with each group of rows; both are quantized from the unquantized values. A row's own
//! blocks are the same in every group, so that rows are quantized before products gather them; the quantization itself gathers
//! those along the rows of a group.
//! Weights have blocks along k for the forward pass and along n for the gradient of the input, made once for each
//! optimizer step.

use dropless_core::ops::{BlockFormat, ColumnBlocks, GroupQuantize, Operand, RowBlocks};
use dropless_core::{Backend, DType, Memory, Result, Tensor};

/// MXFP8 as recipes take it: nothing saturates.
pub(crate) const MXFP8: BlockFormat = BlockFormat::Mxfp8 { floor: false };
/// FP8 blocks as recipes take them: with power-of-two scales.
pub(crate) const FP8_BLOCK: BlockFormat = BlockFormat::Fp8Block { f32_scale: false };

/// Codes and scales.
#[derive(Clone, Debug)]
struct Blocks {
    codes: Tensor,
    scales: Tensor,
}

impl Blocks {
    fn alloc(backend: &dyn Backend, format: BlockFormat, codes: &[usize], scales: &[usize]) -> Result<Blocks> {
        let scale = if matches!(format, BlockFormat::Mxfp8 { .. }) { DType::Ue8m0 } else { DType::F32 };
        Ok(Blocks {
            codes: backend.alloc(DType::E4m3, codes, Memory::Device)?,
            scales: backend.alloc(scale, scales, Memory::Device)?,
        })
    }

    fn operand<'a>(&'a self, gather: Option<&'a Tensor>) -> Operand<'a> {
        let (codes, scales) = (&self.codes, &self.scales);
        match scales.dtype() {
            DType::Ue8m0 => Operand::Mxfp8 { codes, scales, gather },
            _ => Operand::Fp8Block { codes, scale_inv: scales, gather },
        }
    }

    fn rows(&self) -> RowBlocks<'_> {
        RowBlocks { codes: &self.codes, scales: &self.scales }
    }

    /// Becomes the row-wise blocks of all rows of `values`.
    fn quantize_all(&self, backend: &dyn Backend, format: BlockFormat, values: &Tensor) -> Result<()> {
        let matrix = |x: &Tensor| x.reshape(&[1, x.rows(), x.cols()]);
        let (x, codes, scales) = (matrix(values)?, matrix(&self.codes)?, matrix(&self.scales)?);
        let row = Some(RowBlocks { codes: &codes, scales: &scales });
        let (gather, offsets, column, amax) = (None, None, None, None);
        GroupQuantize { x: &x, gather, offsets, format, square: false, row, column, amax }.run(backend)
    }

    fn columns<'a>(&'a self, offsets: Option<&'a Tensor>) -> ColumnBlocks<'a> {
        ColumnBlocks { codes: &self.codes, scales: &self.scales, offsets }
    }
}

/// A stack of matrices `[groups, n, k]` in the form of a recipe's products.
#[derive(Clone, Debug)]
pub(crate) struct WeightOperands {
    plain: Tensor,
    /// Blocks along k (forward) and along n (gradient of the input).
    quantized: Option<(Blocks, Blocks)>,
}

impl WeightOperands {
    /// The weights as they are.
    pub(crate) fn plain(weights: &Tensor) -> WeightOperands {
        WeightOperands { plain: weights.clone(), quantized: None }
    }

    /// The weights in blocks of this format; without one, as they are.
    pub(crate) fn prepare(
        backend: &dyn Backend,
        format: Option<BlockFormat>,
        weights: &Tensor,
    ) -> Result<WeightOperands> {
        let quantized = format.map(|format| quantize_weights(backend, format, weights)).transpose()?;
        Ok(WeightOperands { plain: weights.clone(), quantized })
    }

    pub(crate) fn forward(&self) -> Operand<'_> {
        self.quantized.as_ref().map_or(Operand::plain(&self.plain), |(row, _)| row.operand(None))
    }

    pub(crate) fn dgrad(&self) -> Operand<'_> {
        self.quantized.as_ref().map_or(Operand::plain(&self.plain), |(_, column)| column.operand(None))
    }

    pub(crate) fn n(&self) -> usize {
        self.plain.shape()[1]
    }

    pub(crate) fn k(&self) -> usize {
        self.plain.shape()[2]
    }
}

fn quantize_weights(backend: &dyn Backend, format: BlockFormat, weights: &Tensor) -> Result<(Blocks, Blocks)> {
    let [groups, n, k] = [0, 1, 2].map(|d| weights.shape()[d]);
    let square = matches!(format, BlockFormat::Fp8Block { .. });
    let (row, column) = if square {
        let blocks = |len: usize| len.div_ceil(128);
        (
            Blocks::alloc(backend, format, &[groups, n, k], &[groups, blocks(n), blocks(k)])?,
            Blocks::alloc(backend, format, &[groups, k, n], &[groups, blocks(k), blocks(n)])?,
        )
    } else {
        (
            Blocks::alloc(backend, format, &[groups, n, k], &[groups, n, k / 32])?,
            Blocks::alloc(backend, format, &[groups, n, k], &[groups, n / 32, k])?,
        )
    };
    GroupQuantize {
        x: weights,
        gather: None,
        offsets: None,
        format,
        square,
        row: Some(row.rows()),
        column: Some(column.columns(None)),
        amax: None,
    }
    .run(backend)?;
    Ok((row, column))
}

/// Which products an operand takes part in.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Uses {
    along_columns: bool,
    along_rows: bool,
}

/// The forward pass, or the gradient of the input.
pub(crate) const FORWARD: Uses = Uses { along_columns: true, along_rows: false };
/// The weight gradient.
pub(crate) const WGRAD: Uses = Uses { along_columns: false, along_rows: true };
/// Both.
pub(crate) const BOTH: Uses = Uses { along_columns: true, along_rows: true };

/// Rows as operands of a recipe's products: plain, gathered on the fly, or quantized for the uses that were asked for.
pub(crate) struct Rows<'a> {
    values: &'a Tensor,
    gather: Option<&'a Tensor>,
    row: Option<Blocks>,
    /// With the offsets of the padded groups.
    column: Option<(Blocks, Tensor)>,
}

impl<'a> Rows<'a> {
    /// The values of the groups between `offsets`, or of each row the one that `gather` names.
    pub(crate) fn new(
        backend: &dyn Backend,
        format: Option<BlockFormat>,
        values: &'a Tensor,
        gather: Option<&'a Tensor>,
        offsets: &Tensor,
        uses: Uses,
    ) -> Result<Rows<'a>> {
        let Some(format) = format else {
            return Ok(Rows { values, gather, row: None, column: None });
        };
        let (sources, cols, block) = (values.rows(), values.cols(), format.block());
        let row = if uses.along_columns {
            Some(Blocks::alloc(backend, format, &[sources, cols], &[sources, cols.div_ceil(block)])?)
        } else {
            None
        };
        let column = if uses.along_rows {
            let padded = GroupQuantize::padded_rows(format, gather.map_or(sources, Tensor::len), offsets.len() - 1);
            let turned = matches!(format, BlockFormat::Fp8Block { .. });
            let codes = if turned { [cols, padded] } else { [padded, cols] };
            let blocks = Blocks::alloc(backend, format, &codes, &[padded / block, cols])?;
            Some((blocks, backend.alloc(DType::U32, &[offsets.len()], Memory::Device)?))
        } else {
            None
        };
        if let (Some(row), Some(_)) = (&row, gather) {
            row.quantize_all(backend, format, values)?;
        }
        let quantize = GroupQuantize {
            x: values,
            gather,
            offsets: Some(offsets),
            format,
            square: false,
            row: row.as_ref().filter(|_| gather.is_none()).map(Blocks::rows),
            column: column.as_ref().map(|(blocks, padded)| blocks.columns(Some(padded))),
            amax: None,
        };
        if quantize.row.is_some() || quantize.column.is_some() {
            quantize.run(backend)?;
        }
        Ok(Rows { values, gather, row, column })
    }

    /// Type of the unquantized values.
    pub(crate) fn dtype(&self) -> DType {
        self.values.dtype()
    }

    fn plain(&self) -> Operand<'_> {
        Operand::Plain { values: self.values, gather: self.gather }
    }

    /// The operand of a product along the columns.
    pub(crate) fn row(&self) -> Operand<'_> {
        self.row.as_ref().map_or(self.plain(), |row| row.operand(self.gather))
    }

    /// The operand of a weight gradient, with the offsets that belong to it.
    pub(crate) fn column<'b>(&'b self, offsets: &'b Tensor) -> (Operand<'b>, &'b Tensor) {
        self.column.as_ref().map_or((self.plain(), offsets), |(blocks, padded)| (blocks.operand(None), padded))
    }
}
