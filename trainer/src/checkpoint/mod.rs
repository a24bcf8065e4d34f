//! What a run saves: `OUT/checkpoints/step-000020/`, which appears only when complete.
//!
//! ```text
//! model.safetensors        weights under their Hugging Face names (of several ranks, a shard of each:
//!                          model-00001-of-00004.safetensors and so on, with model.safetensors.index.json)
//! optimizer.safetensors    exp_avg.NAME and exp_avg_sq.NAME, likewise
//! config.json              the model for Hugging Face libraries, and its special tokens
//! generation_config.json   the special tokens again, for generation there
//! tokenizer.json           and what belongs to it, unless the tokens are bytes
//! state.json               step, place in the data, validation loss if the step was validated, configuration, digest,
//!                          and each file's size and hash
//! ```
//!
//! `save` writes under a temporary name, syncs, and renames; [`newest`] and [`best`] find one that is undamaged.

mod digest;
mod find;
mod own;
mod save;

pub use digest::digest;
pub(crate) use find::steps;
pub use find::{Checkpoint, Found, best, newest, newest_state};
pub(crate) use own::holds_nothing;
pub use own::remove_incomplete;
pub use save::{Contents, Save, Saved, Stem, directory, save};
pub(crate) use save::{Plan, origin, text};

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::data::{Position, TextRecord};
use crate::train::Mean;
use dropless_model::hf::tensors::FileRecord;

/// What a run needs besides tensors to resume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Steps completed.
    pub step: u64,
    /// Position in the training text.
    pub position: Position,
    /// What the texts are.
    pub text: TextRecord,
    /// The configuration.
    pub config: Config,
    /// The validation loss after the step, if it was validated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// The losses on the whole validation sets, by their names, if the run was done with this step: a run that is resumed
    /// there has them already.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub validation: BTreeMap<String, Mean>,
}

/// Version of the layout; a reader refuses others.
const FORMAT: u32 = 3;
/// The name of the file below.
pub(crate) const STATE: &str = "state.json";
/// Folder of the checkpoints in a run's directory.
pub(crate) const FOLDER: &str = "checkpoints";

/// `state.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    digest: String,
    #[serde(flatten)]
    state: State,
    files: BTreeMap<String, FileRecord>,
    /// Hash of all of the above.
    seal: String,
}

impl Manifest {
    /// The seal that belongs to the other fields.
    fn expected_seal(&self) -> String {
        let sealed = (self.format, &self.digest, &self.state, &self.files);
        let json = serde_json::to_vec(&sealed).unwrap_or_else(|e| unreachable!("plain data: {e}"));
        blake3::hash(&json).to_hex().to_string()
    }
}
