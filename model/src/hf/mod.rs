//! Hugging Face model directories: `config.json` and safetensors files.
//!
//! [`ModelDir`] is one that has been read and checked, [`WeightFiles`] its tensors by the names of the model's pieces;
//! [`convert()`] writes one from another, [`Inspection`] describes one.

mod blocks;
pub mod config;
mod convert;
mod dir;
mod elements;
mod inspect;
pub mod layout;
mod listing;
mod open_file;
pub mod tensors;
mod weight_files;

pub use blocks::Blocks;
pub use config::{HfConfig, SpecialTokens};
pub use convert::{Conversion, convert};
pub use dir::ModelDir;
pub use inspect::Inspection;
pub use layout::{Experts, Layout};
pub use open_file::OpenFile;
pub use tensors::{NamedTensor, TensorFiles};
pub use weight_files::WeightFiles;
