//! Training of Mixture-of-Experts language models that never drop a token: the program `dropless` as a library.
//!
//! Read in this order: [`config`] (every key), [`data`] (text to batches), [`schedule`] (a pure function of the step),
//! [`train`] (the steps), [`checkpoint`] (what a run saves), [`cli`] (the commands). The model itself is
//! [`dropless_model`].

pub mod backends;
pub mod bench;
pub mod checkpoint;
pub mod cli;
mod collective;
pub mod config;
pub mod data;
pub mod error;
pub mod generate;
pub mod metrics;
pub mod options;
mod output;
pub mod progress;
pub mod sample;
pub mod schedule;
pub mod source;
pub mod stop;
mod system;
mod trace;
pub mod train;
pub mod verify;

pub use config::Config;
pub use error::{Error, Result};
