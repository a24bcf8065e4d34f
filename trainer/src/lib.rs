//! Training of Mixture-of-Experts language models that never drop a token: the program `dropless` as a library.
//!
//! Read in this order: [`config`] (every key), [`data`] (text to batches), [`schedule`] and [`init`] (pure functions of
//! step and seed), [`model`], [`train`] (the steps), [`checkpoint`] (what a run leaves behind), [`cli`] (the commands).

mod backends;
pub mod bench;
pub mod checkpoint;
pub mod cli;
mod collective;
pub mod config;
pub mod data;
pub mod error;
pub mod flops;
pub mod generate;
pub mod init;
mod memory;
pub mod metrics;
pub mod model;
pub mod options;
pub mod sample;
pub mod schedule;
pub mod train;
pub mod verify;

pub use config::Config;
pub use error::{Error, Result};
