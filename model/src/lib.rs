//! Mixture-of-Experts language models on any backend of [`dropless_core`].
//!
//! Read in this order: [`families`] (the parts of published models, one file per family), [`architecture`] (the parts),
//! [`Model`] (forward and backward), [`nn`], [`attention`] and [`moe`] (the layers), [`Params`] and [`TrainState`]
//! (weights; gradients and moments), [`optimizer`], [`hf`] (Hugging Face checkpoints in and out).
//! `examples/moe_layer.rs` runs the Mixture-of-Experts layer alone.

pub mod architecture;
pub mod attention;
mod cache;
pub mod collective;
mod context;
mod decode;
mod embedding;
pub mod error;
pub mod families;
mod fields;
mod flops;
mod head;
pub mod hf;
pub mod init;
mod layer;
mod model;
pub mod moe;
pub mod names;
mod next_token;
pub mod nn;
pub mod optimizer;
mod options;
mod params;
pub mod rope;
mod single;
mod train_state;
mod weights;
pub mod words;

pub use architecture::Architecture;
pub use cache::Cache;
pub use context::{Activations, Inputs, NextInputs};
pub use error::{Error, Result};
pub use families::ModelConfig;
pub use layer::Balancing;
pub use model::{Losses, Model};
pub use options::Options;
pub use params::{Initial, Params, Piece};
pub use single::{Single, single};
pub use train_state::{GradientSums, Moments, TrainState};
