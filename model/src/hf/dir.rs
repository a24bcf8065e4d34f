//! A model directory: `config.json`, and `model.safetensors` or shards with `model.safetensors.index.json`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::blocks::Blocks;
use super::config::{CONFIG, HfConfig};
use super::tensors::TensorFiles;
use super::weight_files::WeightFiles;
use crate::error::{Error, Result};

/// A model directory whose files fit each other.
#[derive(Debug)]
pub struct ModelDir {
    /// The directory.
    pub path: PathBuf,
    /// Its configuration, without a multi-token-prediction module that the files do not hold.
    pub config: HfConfig,
    /// Its tensors.
    pub weights: WeightFiles,
}

impl ModelDir {
    /// Reads the configuration and the headers of the files, and compares them.
    ///
    /// # Errors
    /// As [`HfConfig::read`], [`TensorFiles::open`] and [`WeightFiles::find`]; and for quantized weights other than FP8 in
    /// blocks.
    pub fn open(path: &Path) -> Result<ModelDir> {
        let file = path.join(CONFIG);
        let mut config = HfConfig::read(&file)?;
        let blocks = match config.fields.get("quantization_config") {
            None | Some(Value::Null) => None,
            Some(found) => Some(Blocks::of(found).map_err(|what| Error::checkpoint(&file, what))?),
        };
        let files = TensorFiles::open(path, "model")?;
        // A configuration usually names its multi-token-prediction module even where its weights are left out.
        config.model.drop_absent_modules(|prefix| {
            files.names().any(|name| name.strip_prefix("model.").unwrap_or(name).starts_with(prefix))
        });
        let weights = WeightFiles::find(files, &config.model.architecture(), blocks)?;
        Ok(ModelDir { path: path.to_owned(), config, weights })
    }

    /// A line for each thing in the directory that is ignored: tensors, and keys of the configuration.
    pub fn notes(&self) -> Vec<String> {
        let keys = &self.config.ignored;
        let keys = (!keys.is_empty()).then(|| {
            format!("note: {}: unknown keys are ignored: {}", self.path.join(CONFIG).display(), keys.join(", "))
        });
        keys.into_iter().chain(self.weights.note()).collect()
    }
}
