//! A model that is there to be used: of a checkpoint of a run, or of a model directory of whatever origin.

use std::path::{Path, PathBuf};

use dropless_model::hf::{ModelDir, WeightFiles};

use crate::checkpoint::Checkpoint;
use crate::config::{Config, Tokenizer};
use crate::data::TOKENIZER;
use crate::error::Result;
use crate::output;

/// A model with its weights.
#[derive(Debug)]
pub struct Source {
    /// The checkpoint or directory.
    pub path: PathBuf,
    /// Its configuration; all but the model is the default's where a directory has none.
    pub config: Config,
    /// Steps of the checkpoint.
    pub step: Option<u64>,
    /// The weights.
    pub weights: WeightFiles,
}

impl Source {
    /// The model of a checkpoint, with changes of the configuration around it.
    ///
    /// # Errors
    /// [`crate::Error::Config`], also for changes that make it another model, and [`crate::Error::Checkpoint`] for tensors that do not fit.
    pub fn of_checkpoint(checkpoint: &Checkpoint, overrides: &[String]) -> Result<Source> {
        let mut config = checkpoint.state.config.clone();
        let own = checkpoint.path.join(TOKENIZER);
        if let Some(own) = own.to_str().filter(|_| own.is_file()) {
            // What the run's tokenizer was lies beside the weights.
            config.data.tokenizer = Tokenizer::File(own.to_owned());
        }
        let config = config.with(overrides)?;
        config.check_model(&checkpoint.state.config.model, &checkpoint.path)?;
        let (path, step) = (checkpoint.path.clone(), Some(checkpoint.state.step));
        Ok(Source { path, config, step, weights: checkpoint.mapped()? })
    }

    /// The model of a directory, with this configuration around it.
    ///
    /// # Errors
    /// As [`ModelDir::open`] and [`Config::of_model`].
    pub fn of_directory(path: &Path, file: Option<&Path>, overrides: &[String]) -> Result<Source> {
        let dir = ModelDir::open(path)?;
        dir.notes().iter().for_each(output::tell);
        let config = Config::of_model(&dir, file, overrides)?;
        Ok(Source { path: dir.path, config, step: None, weights: dir.weights })
    }
}
