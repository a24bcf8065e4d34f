//! The row-wise ops, a closed set: everything a model needs besides products, attention and routing.
//!
//! A row is the last dimension of a tensor. Every op here reads f32 or bf16 (exactly), computes in f32 and, for bf16
//! results, rounds once to nearest even. NUMERICS.md, "Row-wise ops", has the formulas and the order of every sum.

mod elementwise;
mod loss;
mod norm;
mod optimizer;
mod reduce;
mod rotary;
mod rows;
mod swiglu;

pub use elementwise::{Add, Cast, CopyColumns, Fill};
pub use loss::CrossEntropy;
pub use norm::{RmsNorm, RmsNormGrad};
pub use optimizer::{AdamW, BiasUpdate, ClipScale};
pub use reduce::{SumRows, SumSquares, TreeSum};
pub use rotary::{Angles, Mla, MlaGrad, MlaShape, Rotary};
pub use rows::{Combine, EmbeddingGrad, GatherRows};
pub use swiglu::{Swiglu, SwigluGrad};

use super::arguments::family;
use super::{Checked, Op};
use crate::backend::{Backend, Caps};
use crate::error::Result;

macro_rules! map_ops {
    ($($name:ident),+ $(,)?) => {
        /// A row-wise op.
        #[derive(Clone, Copy, Debug)]
        pub enum Map<'a> {
            $(#[doc = concat!("See [`", stringify!($name), "`].")] $name($name<'a>),)+
        }

        impl Map<'_> {
            /// Checks the arguments.
            ///
            /// # Errors
            /// [`crate::Error::Argument`].
            pub fn check(self, _caps: &Caps) -> Result<Checked<Self>> {
                match &self { $(Map::$name(op) => op.check()?,)+ }
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

        family!(Map { $($name),+ }, named |map: &Map<'_>| match map { $(Map::$name(_) => $name::OP,)+ }, by map);

        $(impl<'a> From<$name<'a>> for Map<'a> {
            fn from(op: $name<'a>) -> Self { Map::$name(op) }
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

map_ops!(
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
);
