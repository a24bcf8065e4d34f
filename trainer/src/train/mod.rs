//! Training: [`run`].

mod inputs;
mod optimizer;
pub mod ranks;
mod step;
