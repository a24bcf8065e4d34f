//! Text from a checkpoint.
//!
//! Each token is computed from the whole visible context. A row's bits do not depend on what stands beside it, so keys and
//! values from a cache would be the same ones.

use dropless_core::ops::NONE;
use dropless_core::{Backend, DType};
use dropless_model::nn::Tokens;
use dropless_model::{Inputs, Model};

use crate::checkpoint::Checkpoint;
use crate::config::{Config, MoeConfig};
use crate::data::END;
use crate::error::{Error, Result};
use crate::options::TrainOptions;
use crate::sample::Sampling;
use crate::train::state;

/// A model that continues text.
#[derive(Debug)]
pub struct Generator {
    backend: Box<dyn Backend>,
    model: Model,
    window: usize,
}

impl Generator {
    /// Loads the weights of a checkpoint, for one rank. `numerics` of the checkpoint's configuration apply.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for tensors that do not fit; those of the backend.
    pub fn open(checkpoint: &Checkpoint, options: &TrainOptions) -> Result<Generator> {
        let config = &checkpoint.state.config;
        let backend = options.open_one(config.train.numerics.into())?;
        let window = config.train.sequence_length;
        // One sequence is one shard and one piece, however the run was cut.
        let alone = Config { moe: MoeConfig { chunks: 1, expert_shards: 1, memory_budget_mb: 0 }, ..config.clone() };
        let tokens = Tokens::new(&*backend, 1, window, 1)?;
        let mut model = Model::new(&*backend, &alone.model.architecture(), &alone.inference(), &tokens)?;
        state::load(&*backend, &mut model, &checkpoint.weights, None)?;
        Ok(Generator { backend, model, window })
    }

    /// Logits of the token after `ids`, of which the last [`sequence_length`](crate::config::TrainConfig) count.
    fn logits(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let backend = &*self.backend;
        let context = &ids[ids.len().saturating_sub(self.window)..];
        let len = context.len();
        let tokens = Tokens::new(backend, 1, len, 1)?;
        let positions: Vec<u32> = (0u32..).take(len).collect();
        let put = |values: &[u32]| backend.upload(DType::U32, &[len], values);
        let inputs = Inputs {
            ids: put(context)?,
            targets: put(&vec![NONE; len])?,
            positions: put(&positions)?,
            start: put(&vec![0; len])?,
            scale: backend.upload(DType::F32, &[1], &[0.0f32])?,
            next: None,
        };
        let logits = self.model.logits(backend, &tokens, &inputs)?;
        Ok(backend.download(&logits.index(len - 1)?)?)
    }

    /// Continues `prompt` by at most `tokens` tokens, up to the end of the document; `on_bytes` sees each byte at once.
    ///
    /// # Errors
    /// [`Error::Usage`] for an empty prompt; those of the ops.
    pub fn continue_text(
        &self,
        prompt: &[u8],
        tokens: usize,
        sampling: &Sampling,
        mut on_bytes: impl FnMut(&[u8]),
    ) -> Result<Vec<u8>> {
        if prompt.is_empty() {
            return Err(Error::Usage("the prompt is empty, but the model continues text".into()));
        }
        let mut ids: Vec<u32> = prompt.iter().map(|&b| u32::from(b)).collect();
        let mut text = Vec::new();
        for position in 0..tokens as u64 {
            let mut logits = self.logits(&ids)?;
            // Ids past the end token pad the vocabulary and stand for nothing.
            logits.truncate(END as usize + 1);
            let Some(id) = sampling.choose(&logits, position).filter(|&id| id != END) else { break };
            let Ok(byte) = u8::try_from(id) else { break };
            on_bytes(&[byte]);
            text.push(byte);
            ids.push(id);
        }
        Ok(text)
    }
}
