//! Training of Mixture-of-Experts language models that never drop a token: the program `dropless` as a library.
//!
//! Read in this order: [`config`] (every key), [`data`] (text to batches), [`schedule`] and [`init`] (pure functions of
//! step and seed), [`checkpoint`] (what a run leaves behind), [`cli`] (the commands).

pub mod config;
pub mod error;
pub mod model;
pub mod options;

pub use config::Config;
pub use error::{Error, Result};
