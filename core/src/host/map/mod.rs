//! The row-wise ops on threads: a file for each op that has a faster version than its specification.
//!
//! An op is cut into tiles of whole rows, which the threads of the pool share; a tile is a function compiled once for
//! each level of vector instructions, and most call the row functions of the op's specification. Sums that cross rows are
//! cut at fixed places, so neither the number of threads nor the vector width changes a bit.

mod adamw;
mod add;
mod cast;
mod combine;
mod copy_columns;
mod cross_entropy;
mod embedding_grad;
mod fill;
mod gather_rows;
mod indices;
mod mla;
mod rms_norm;
mod rotary;
mod sum_rows;
mod sum_squares;
mod swiglu;
mod tree;
mod tree_sum;

use super::Simd;
use crate::backend::Backend;
use crate::error::Result;
use crate::ops::{Checked, Map};

/// A row-wise op with a faster version than its specification.
trait Fast {
    fn run(&self, simd: Simd) -> Result<()>;
}

/// Elements of a tile of a flat op: a few kilobytes, which stay in a core's first cache.
const TILE: usize = 4096;

/// Runs these ops' faster versions, and every other one as its specification says.
macro_rules! run {
    ($op:ident in $host:ident with $simd:ident: $($fast:ident),+ $(,)?) => {
        match &**$op {
            $(Map::$fast(op) => Fast::run(op, $simd),)+
            _ => $op.spec($host),
        }
    };
}

pub(super) fn run(op: &Checked<Map<'_>>, host: &dyn Backend, simd: Simd) -> Result<()> {
    run!(
        op in host with simd:
        Add,
        AdamW,
        Cast,
        Combine,
        CopyColumns,
        CrossEntropy,
        EmbeddingGrad,
        Fill,
        GatherRows,
        Mla,
        MlaGrad,
        RmsNorm,
        RmsNormGrad,
        Rotary,
        SumRows,
        SumSquares,
        Swiglu,
        SwigluGrad,
        TreeSum,
    )
}
