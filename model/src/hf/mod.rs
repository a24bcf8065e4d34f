//! Hugging Face model directories: `config.json` and safetensors files.

pub mod config;
pub mod tensors;

pub use tensors::{NamedTensor, TensorFiles};
