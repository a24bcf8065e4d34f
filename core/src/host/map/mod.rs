//! The row-wise ops on threads: each file runs the row functions of its namesake in `ops/map`.
//!
//! An op is cut into tiles of whole rows, which the threads of the pool share; a tile is a function compiled once for
//! each level of vector instructions. Sums that cross rows are cut at fixed places, so neither the number of threads
//! nor the vector width changes a bit.

mod elementwise;
mod indices;
mod loss;
mod norm;
mod optimizer;
mod reduce;
mod rotary;
mod rows;
mod swiglu;
mod tree;

use super::Simd;
use crate::error::Result;
use crate::ops::{Checked, Map};

pub(super) fn run(op: &Checked<Map<'_>>, simd: Simd) -> Result<()> {
    match &**op {
        Map::Add(op) => elementwise::add(op, simd),
        Map::AdamW(op) => optimizer::adamw(op, simd),
        Map::BiasUpdate(op) => optimizer::bias_update(op),
        Map::Cast(op) => elementwise::cast(op, simd),
        Map::ClipScale(op) => optimizer::clip_scale(op),
        Map::Combine(op) => rows::combine(op, simd),
        Map::CopyColumns(op) => elementwise::copy_columns(op),
        Map::CrossEntropy(op) => loss::cross_entropy(op, simd),
        Map::EmbeddingGrad(op) => rows::embedding_grad(op, simd),
        Map::Fill(op) => elementwise::fill(op),
        Map::GatherRows(op) => rows::gather_rows(op, simd),
        Map::Mla(op) => rotary::mla(op, simd),
        Map::MlaGrad(op) => rotary::mla_grad(op, simd),
        Map::RmsNorm(op) => norm::rms_norm(op, simd),
        Map::RmsNormGrad(op) => norm::rms_norm_grad(op, simd),
        Map::Rotary(op) => rotary::rotary(op, simd),
        Map::SumRows(op) => reduce::sum_rows(op, simd),
        Map::SumSquares(op) => reduce::sum_squares(op, simd),
        Map::Swiglu(op) => swiglu::swiglu(op, simd),
        Map::SwigluGrad(op) => swiglu::swiglu_grad(op, simd),
        Map::TreeSum(op) => reduce::tree_sum(op, simd),
    }
}
