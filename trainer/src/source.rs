//! A model that is there to be used: of a checkpoint of a run, or of a model directory of whatever origin.

use std::path::{Path, PathBuf};

use dropless_model::hf::{ModelDir, WeightFiles};

use crate::checkpoint::Checkpoint;
use crate::config::{Config, Tokenizer as Named};
use crate::data::{TOKENIZER, Tokenizer};
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
    /// What makes ids of text.
    pub tokenizer: Tokenizer,
}

impl Source {
    /// The model of a checkpoint, with changes of the configuration around it.
    ///
    /// # Errors
    /// [`crate::Error::Config`], also for changes that make it another model, [`crate::Error::Data`] for its tokenizer, and
    /// [`crate::Error::Checkpoint`] for tensors that do not fit.
    pub fn of_checkpoint(checkpoint: &Checkpoint, overrides: &[String]) -> Result<Source> {
        let mut config = checkpoint.state.config.clone();
        // What the run's tokenizer was lies beside the weights.
        let file = checkpoint.path.join(TOKENIZER);
        let own = match checkpoint.file(TOKENIZER)? {
            Some(_) => file.to_str().map(|path| Named::File(path.to_owned())),
            None => None,
        };
        config.data.tokenizer = own.clone().unwrap_or(config.data.tokenizer);
        let config = config.with(overrides)?;
        config.check_model(&checkpoint.state.config.model, &checkpoint.path)?;
        let tokenizer = match own {
            // Its name may be gone by now.
            Some(own) if config.data.tokenizer == own => Tokenizer::of_files(&file, |name| checkpoint.file(name))?,
            _ => Tokenizer::open(&config.data.tokenizer)?,
        };
        let (path, step) = (checkpoint.path.clone(), Some(checkpoint.state.step));
        Ok(Source { path, config, step, weights: checkpoint.mapped()?, tokenizer })
    }

    /// The model of a directory, with this configuration around it.
    ///
    /// # Errors
    /// As [`ModelDir::open`] and [`Config::of_model`], and for its tokenizer.
    pub fn of_directory(path: &Path, file: Option<&Path>, overrides: &[String]) -> Result<Source> {
        let dir = ModelDir::open(path)?;
        dir.notes().iter().for_each(output::tell);
        let config = Config::of_model(&dir, file, overrides)?;
        let tokenizer = Tokenizer::open(&config.data.tokenizer)?;
        Ok(Source { path: dir.path, config, step: None, weights: dir.weights, tokenizer })
    }
}
