//! Text from a checkpoint.
//!
//! A row's bits do not depend on what stands beside it, so keys and values from a cache are the ones of a pass over the
//! whole text, and several prompts go together.

use dropless_core::{Backend, Tensor};
use dropless_model::Model;
use dropless_model::nn::Tokens;

use crate::config::{Config, MoeConfig};
use crate::data::{Decoder, Tokenizer};
use crate::error::{Error, Result};
use crate::options::TrainOptions;
use crate::sample::Sampling;
use crate::source::Source;
use crate::train::state;

/// Ids of the bytes of a text.
const BYTES: usize = 256;

/// A model that continues text.
#[derive(Debug)]
pub struct Generator {
    backend: Box<dyn Backend>,
    model: Model,
    tokenizer: Tokenizer,
    window: usize,
}

impl Generator {
    /// Loads the weights of a model, for one rank. `numerics` of its configuration apply.
    ///
    /// # Errors
    /// [`Error::Config`] for a model that does not have all tokens, [`Error::Data`] for a tokenizer that cannot be used,
    /// [`Error::Checkpoint`] for tensors that do not fit; those of the backend.
    pub fn open(source: Source, options: &TrainOptions) -> Result<Generator> {
        let Source { config, weights, tokenizer, .. } = source;
        config.check(1, 1)?;
        let vocab = config.model.architecture().vocab;
        match tokenizer {
            // A model of bytes need not have an end token.
            Tokenizer::Byte if vocab < BYTES => {
                return Err(Error::Config(format!("model.vocab_size is {vocab}, but texts are of {BYTES} bytes")));
            }
            Tokenizer::Json(_) => tokenizer.check(vocab, &config.data.tokenizer)?,
            Tokenizer::Byte => {}
        }
        let backend = options.open_one(config.train.numerics.into())?;
        let window = config.train.sequence_length;
        // One sequence is one shard and one piece, however the run was cut.
        let alone = Config { moe: MoeConfig { chunks: 1, expert_shards: 1, memory_budget_mb: 0 }, ..config };
        let tokens = Tokens::new(&*backend, 1, window, 1)?;
        let mut model = Model::new(&*backend, &alone.model.architecture(), &alone.inference(), &tokens)?;
        state::load(&*backend, &mut model, &weights, None)?;
        Ok(Generator { backend, model, tokenizer, window })
    }

    /// What makes ids of text here.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The token after `ids`, number `position` of their continuation, from one pass over the context; None at the end of
    /// the document.
    ///
    /// # Errors
    /// As [`continue_ids`](Generator::continue_ids).
    pub fn next_id(&self, ids: &[u32], position: u64, sampling: &Sampling) -> Result<Option<u32>> {
        let context = &ids[ids.len().saturating_sub(self.window)..];
        let mut cache = self.model.cache(&*self.backend, 1)?;
        let logits = self.model.decode(&*self.backend, &mut cache, &[context])?;
        self.choose(&logits.index(0)?, position, sampling)
    }

    fn choose(&self, logits: &Tensor, position: u64, sampling: &Sampling) -> Result<Option<u32>> {
        let mut logits: Vec<f32> = self.backend.download(logits)?;
        // Ids past the tokenizer's pad the vocabulary and stand for nothing.
        logits.truncate(self.tokenizer.ids());
        Ok(sampling.choose(&logits, position).filter(|&id| !self.tokenizer.ends(id)))
    }

    /// Continues each prompt by at most `tokens` tokens, up to the end of the document; `on_text` sees the number of a
    /// prompt and each piece of its text at once. A text does not depend on the other prompts.
    ///
    /// # Errors
    /// [`Error::Usage`] for an empty prompt, [`Error::Data`] for one of which the tokenizer makes no ids; those of the ops.
    pub fn continue_texts(
        &self,
        prompts: &[&str],
        tokens: usize,
        sampling: &Sampling,
        mut on_text: impl FnMut(usize, &str),
    ) -> Result<Vec<String>> {
        let encode = |prompt: &&str| self.tokenizer.encode(prompt).map_err(|e| Error::Data(format!("the prompt: {e}")));
        let prompts: Vec<Vec<u32>> = prompts.iter().map(encode).collect::<Result<_>>()?;
        let mut decoders: Vec<Decoder<'_>> = prompts.iter().map(|ids| Decoder::new(&self.tokenizer, ids)).collect();
        let mut texts = vec![String::new(); prompts.len()];
        let mut shown = |prompt: usize, text: &str| {
            texts[prompt].push_str(text);
            if !text.is_empty() {
                on_text(prompt, text);
            }
        };
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        self.continue_ids(&prompts, tokens, sampling, |prompt, id| {
            shown(prompt, &decoders[prompt].push(id)?);
            Ok(())
        })?;
        for (prompt, decoder) in decoders.into_iter().enumerate() {
            shown(prompt, &decoder.finish()?);
        }
        Ok(texts)
    }

    /// The same of token ids.
    ///
    /// The last [`sequence_length`](crate::config::TrainConfig) tokens are the context. As long as there are no more, each
    /// pass computes the new tokens alone, on the keys and values of the ones before.
    ///
    /// # Errors
    /// [`Error::Usage`] for an empty prompt; those of the ops and of `on_id`.
    pub fn continue_ids(
        &self,
        prompts: &[&[u32]],
        tokens: usize,
        sampling: &Sampling,
        mut on_id: impl FnMut(usize, u32) -> Result<()>,
    ) -> Result<Vec<Vec<u32>>> {
        if prompts.iter().any(|prompt| prompt.is_empty()) {
            return Err(Error::Usage("the prompt is empty, but the model continues text".into()));
        }
        let backend = &*self.backend;
        let mut cache = self.model.cache(backend, prompts.len())?;
        let mut texts: Vec<Text> = prompts.iter().map(|prompt| Text::new(prompt)).collect();
        for position in 0..tokens as u64 {
            for (sequence, text) in texts.iter_mut().enumerate() {
                if text.ids.len() > self.window && !text.done {
                    // Every position moves, so nothing that was kept is of use.
                    cache.clear(sequence);
                    text.seen = text.ids.len() - self.window;
                }
            }
            let new: Vec<&[u32]> = texts.iter().map(Text::unseen).collect();
            if new.iter().all(|ids| ids.is_empty()) {
                break;
            }
            let logits = self.model.decode(backend, &mut cache, &new)?;
            for (sequence, text) in texts.iter_mut().enumerate().filter(|(_, text)| !text.done) {
                text.seen = text.ids.len();
                match self.choose(&logits.index(sequence)?, position, sampling)? {
                    Some(id) => {
                        on_id(sequence, id)?;
                        text.ids.push(id);
                    }
                    None => text.done = true,
                }
            }
        }
        Ok(texts.iter().map(|text| text.ids[text.prompt..].to_vec()).collect())
    }
}

/// A text under way.
struct Text {
    ids: Vec<u32>,
    prompt: usize,
    /// Tokens that the cache has, or that lie before the context.
    seen: usize,
    done: bool,
}

impl Text {
    fn new(prompt: &[u32]) -> Text {
        Text { ids: prompt.to_vec(), prompt: prompt.len(), seen: 0, done: false }
    }

    /// What the model has to see next.
    fn unseen(&self) -> &[u32] {
        if self.done { &[] } else { &self.ids[self.seen..] }
    }
}
