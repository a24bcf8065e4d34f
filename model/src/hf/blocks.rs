//! FP8 weights of foreign checkpoints: e4m3 codes, and a factor for each block of rows and columns.
//!
//! `X.weight` `[.., rows, columns]` has its factors in `X.weight_scale_inv` `[.., blocks of rows, blocks of columns]`, f32
//! or ue8m0; the last blocks may be partial. The value of an element is the f32 product of its code's value and its
//! block's factor. Fused experts have one grid for each expert's matrix of gate and up.

use std::ops::Range;

use dropless_core::numerics::{e4m3, ue8m0};
use safetensors::Dtype;
use serde_json::Value;

use super::elements;

/// What the name of the factors ends with, after the weight's own name.
pub(super) const SCALE_SUFFIX: &str = "_scale_inv";

/// Rows and columns that share a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
}

impl Blocks {
    /// Out of the `quantization_config` of a `config.json`.
    ///
    /// # Errors
    /// A line that names the key: a method other than FP8 in blocks, or a block size that is missing or is none.
    pub(super) fn of(config: &Value) -> Result<Blocks, String> {
        let wrong = |key: &str, expected: &str| match config.get(key) {
            None | Some(Value::Null) => format!("quantization_config.{key} is absent, expected {expected}"),
            Some(found) => format!("quantization_config.{key} is {found}, expected {expected}"),
        };
        if config.get("quant_method").and_then(Value::as_str) != Some("fp8") {
            return Err(wrong("quant_method", "\"fp8\", the only one that is supported"));
        }
        if config.get("fmt").is_some_and(|fmt| !fmt.is_null() && fmt != "e4m3") {
            return Err(wrong("fmt", "\"e4m3\""));
        }
        let size = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0);
        match config.get("weight_block_size").and_then(Value::as_array).map(Vec::as_slice) {
            Some([rows, columns]) => size(rows).zip(size(columns)).map(|(rows, columns)| Blocks { rows, columns }),
            _ => None,
        }
        .ok_or_else(|| wrong("weight_block_size", "[rows, columns]"))
    }

    /// The shape of the factors of a weight; None of what is no matrix.
    pub(super) fn scales(&self, shape: &[usize]) -> Option<Vec<usize>> {
        let (columns, rest) = shape.split_last()?;
        let (rows, groups) = rest.split_last()?;
        Some([groups, &[rows.div_ceil(self.rows), columns.div_ceil(self.columns)]].concat())
    }

    /// The values of the codes of `range`, elements of a weight `[.., rows, columns]`. `scales` are the factors of all its
    /// matrices, those before `first` left out.
    pub(super) fn dequantize(&self, codes: &[u8], range: Range<usize>, weight: &Grid, scales: &[f32]) -> Vec<f32> {
        let Grid { rows, columns, first } = *weight;
        let across = columns.div_ceil(self.columns);
        let mut out = Vec::with_capacity(codes.len());
        let mut at = range.start;
        while at < range.end {
            let (row, column) = (at / columns, at % columns);
            let (matrix, row) = (row / rows - first, row % rows);
            let block = column / self.columns;
            let to = range.end.min(at - column + columns.min((block + 1) * self.columns));
            let scale = scales[(matrix * rows.div_ceil(self.rows) + row / self.rows) * across + block];
            out.extend(codes[at - range.start..to - range.start].iter().map(|&code| e4m3::to_f32(code) * scale));
            at = to;
        }
        out
    }
}

/// The matrices of a weight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// The first one that is looked at.
    pub(super) first: usize,
}

/// Types of factors.
pub(super) const SCALES: [Dtype; 4] = [Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F8_E8M0];

/// The factors' values; None for other types.
pub(super) fn decode_scales(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    match dtype {
        Dtype::F8_E8M0 => Some(bytes.iter().map(|&code| ue8m0::to_f32(code)).collect()),
        other => elements::decode(other, bytes),
    }
}
