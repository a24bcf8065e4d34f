//! The row-wise ops, a closed set: everything a model needs besides products, attention and routing.
//!
//! A row is the last dimension of a tensor. Every op here reads f32 or bf16 (exactly), computes in f32 and, for bf16
//! results, rounds once to nearest even. NUMERICS.md, "Row-wise ops", has the formulas and the order of every sum.
//! [`map_ops!`](crate::map_ops!) lists them.

mod adamw;
mod add;
mod bias_update;
mod cast;
mod clip_scale;
mod combine;
mod copy_columns;
mod cross_entropy;
mod embedding_grad;
mod fill;
mod gather_rows;
mod mla;
mod rms_norm;
mod rotary;
mod sum_rows;
mod sum_squares;
mod swiglu;
mod tree_sum;

pub use adamw::AdamW;
pub use add::Add;
pub use bias_update::BiasUpdate;
pub use cast::Cast;
pub use clip_scale::ClipScale;
pub use combine::Combine;
pub use copy_columns::CopyColumns;
pub use cross_entropy::CrossEntropy;
pub use embedding_grad::EmbeddingGrad;
pub use fill::Fill;
pub use gather_rows::GatherRows;
pub use mla::{Mla, MlaGrad, MlaShape};
pub use rms_norm::{RmsNorm, RmsNormGrad};
pub use rotary::{Angles, Pairs, Rotary};
pub use sum_rows::SumRows;
pub use sum_squares::SumSquares;
pub use swiglu::{Swiglu, SwigluGrad};
pub use tree_sum::TreeSum;

use super::arguments::family;
use super::{Checked, Op};
use crate::backend::{Backend, Caps};
use crate::error::Result;

/// Does the same with every row-wise op: `map_ops!(match op, op => op.launch(device))` runs the expression on the right with
/// the struct that is in the `&Map` on the left, and `map_ops!(each Op => Op::SHADERS)` is an array of the expression with
/// each struct in the place of `Op`. This is the one place that lists them.
#[macro_export]
macro_rules! map_ops {
    (each $Op:ident => $do:expr) => { $crate::map_ops!(@list each [$Op => $do]) };
    (match $map:expr, $op:ident => $do:expr) => { $crate::map_ops!(@list matched [$map, $op => $do]) };
    (@list $then:ident $given:tt) => {
        $crate::map_ops! {
            @$then
            $given
            Add,
            AdamW,
            BiasUpdate,
            Cast,
            ClipScale,
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
        }
    };
    (@matched [$map:expr, $op:ident => $do:expr] $($name:ident,)+) => {
        match $map { $($crate::ops::Map::$name($op) => $do,)+ }
    };
    (@each [$Op:ident => $do:expr] $($name:ident,)+) => {
        [$({
            use $crate::ops::$name as $Op;
            $do
        }),+]
    };
    (@declared [$declare:ident] $($name:ident,)+) => { $declare!($($name),+); };
}

macro_rules! declare {
    ($($name:ident),+) => {
        /// A row-wise op.
        #[derive(Clone, Copy, Debug)]
        pub enum Map<'a> {
            $(#[doc = concat!("See [`", stringify!($name), "`].")] $name($name<'a>),)+
        }

        family!(Map { $($name named $name::OP),+ }, by map);

        $(impl<'a> From<$name<'a>> for Map<'a> {
            fn from(op: $name<'a>) -> Self {
                Map::$name(op)
            }
        }

        impl $name<'_> {
            /// Checks and queues.
            ///
            /// # Errors
            /// [`crate::Error::Argument`]; a failure of the device.
            pub fn run(self, backend: &dyn Backend) -> Result<()> {
                Map::from(self).run(backend)
            }
        })+
    };
}

map_ops!(@list declared [declare]);

impl Map<'_> {
    /// Checks the arguments.
    ///
    /// # Errors
    /// [`crate::Error::Argument`].
    pub fn check(self, _caps: &Caps) -> Result<Checked<Self>> {
        map_ops!(match &self, op => op.check())?;
        Ok(Checked::new(self))
    }

    /// Checks and queues.
    ///
    /// # Errors
    /// [`crate::Error::Argument`]; a failure of the device.
    pub fn run(self, backend: &dyn Backend) -> Result<()> {
        let _span = tracing::trace_span!("map", op = self.name()).entered();
        backend.map(&self.check(backend.caps())?)
    }
}
