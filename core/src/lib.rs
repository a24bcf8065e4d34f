//! The specification of Dropless: what every backend computes, to the last bit.
//!
//! Read in this order: [`backend`] (the trait), [`ops`] (one file per op: arguments, checks, the specification in plain
//! Rust), [`numerics`] (number formats and the tensor-core models), [`host`] (the backend that runs the specification
//! on CPU threads), [`launch`] (the parameters of GPU kernels). `NUMERICS.md` in the repository root is the contract
//! that these modules implement; the crate `dropless-model` has models that run on any backend. To write another
//! backend, continue with [`fallback`].

pub mod around;
pub mod backend;
pub mod dry;
pub mod error;
pub mod escape;
pub mod exchange;
pub mod fallback;
pub mod files;
pub mod host;
pub mod launch;
pub mod lockstep;
pub mod numerics;
pub mod ops;
pub mod tensor;
pub mod timeouts;
pub mod trace;
pub mod world;

pub use backend::{Backend, Caps, Event, Group, Queue, Timings};
pub use error::{Error, Result};
pub use numerics::NumericModel;
pub use ops::Checked;
pub use tensor::{DType, Memory, Tensor};
pub use timeouts::Timeouts;
pub use world::World;
