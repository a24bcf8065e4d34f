//! A stream of tokens: documents, one after the other, each closed by an end token. It is read where it lies, in mapped
//! files or in memory, a window at a time.

use std::ops::Range;
use std::sync::Arc;

use dropless_model::words::count;

use super::indexed::{self, IdType};
use super::{Bytes, Documents, END};
use crate::error::{Error, Result};

/// Documents as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corpus {
    parts: Vec<Part>,
    /// Where each part begins, and the number of tokens.
    starts: Vec<usize>,
    end: u32,
}

/// A part of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    /// A document whose bytes are its ids, and the end token.
    Bytes { text: Bytes, range: Range<usize> },
    /// A range of the tokens of documents.
    Ids { documents: Arc<Documents>, range: Range<usize> },
}

impl Part {
    fn tokens(&self) -> usize {
        match self {
            Part::Bytes { range, .. } => range.len() + 1,
            Part::Ids { range, .. } => range.len(),
        }
    }
}

impl Corpus {
    fn new(parts: Vec<Part>, end: u32) -> Corpus {
        let mut starts = vec![0];
        let mut tokens = 0;
        for part in &parts {
            tokens += part.tokens();
            starts.push(tokens);
        }
        Corpus { parts, starts, end }
    }

    /// Documents of bytes. Empty ones are left out.
    pub fn from_bytes(documents: impl IntoIterator<Item = Vec<u8>>) -> Corpus {
        let whole = |text: Vec<u8>| (0..text.len(), Bytes::from(text));
        Corpus::of_bytes(documents.into_iter().map(whole).map(|(range, text)| (text, range)))
    }

    /// The same of parts of what may be shared.
    pub(super) fn of_bytes(documents: impl IntoIterator<Item = (Bytes, Range<usize>)>) -> Corpus {
        let documents = documents.into_iter().filter(|(_, range)| !range.is_empty());
        Corpus::new(documents.map(|(text, range)| Part::Bytes { text, range }).collect(), END)
    }

    /// All tokens of documents of ids.
    pub(super) fn of_documents(documents: Arc<Documents>, end: u32) -> Corpus {
        let range = 0..documents.tokens();
        Corpus::new(vec![Part::Ids { documents, range }], end)
    }

    /// Documents of ids below `vocab`, each closed by `end` here.
    ///
    /// # Errors
    /// [`Error::Data`] names the document and the position of an id that is too large.
    pub fn from_ids(documents: &[Vec<u32>], end: u32, vocab: usize) -> Result<Corpus> {
        let (mut ids, mut lengths, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for (document, all) in documents.iter().enumerate() {
            if let Some(position) = all.iter().position(|&id| id as usize >= vocab) {
                return Err(Error::Data(format!(
                    "document {document}, position {position}: id {} is not below model.vocab_size, {vocab}",
                    all[position]
                )));
            }
            IdType::I64.write(all, &mut ids);
            lengths
                .push(u32::try_from(all.len()).map_err(|_| Error::Data(format!("document {document} is too long")))?);
            ends.push(lengths.len() as u64);
        }
        let index = indexed::index(IdType::I64, &lengths, &ends);
        let documents = Documents::new(ids.into(), index.into(), end).map_err(Error::Data)?;
        Ok(Corpus::of_documents(Arc::new(documents), end))
    }

    /// This stream and those after it as one.
    pub(super) fn join(all: Vec<Corpus>, end: u32) -> Corpus {
        Corpus::new(all.into_iter().flat_map(|corpus| corpus.parts).collect(), end)
    }

    /// The tokens before and from `at` on.
    pub(super) fn split(self, at: usize) -> (Corpus, Corpus) {
        let end = self.end;
        let (mut before, mut after) = (Vec::new(), Vec::new());
        for (part, start) in self.parts.into_iter().zip(self.starts) {
            match part {
                part if start + part.tokens() <= at => before.push(part),
                part if start >= at => after.push(part),
                Part::Ids { documents, range } => {
                    let middle = range.start + (at - start);
                    before.push(Part::Ids { documents: documents.clone(), range: range.start..middle });
                    after.push(Part::Ids { documents, range: middle..range.end });
                }
                Part::Bytes { .. } => unreachable!("documents of bytes are divided one by one"),
            }
        }
        (Corpus::new(before, end), Corpus::new(after, end))
    }

    /// Number of tokens, end tokens included.
    pub fn len(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The token that ends a document.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// Appends the tokens of a range, as far as they are there.
    pub fn read(&self, range: Range<usize>, out: &mut Vec<u32>) {
        let first = self.starts.partition_point(|&start| start <= range.start).saturating_sub(1);
        for (part, &start) in self.parts.iter().zip(&self.starts).skip(first) {
            if start >= range.end {
                break;
            }
            // Within the part.
            let from = range.start.saturating_sub(start);
            let to = (range.end - start).min(part.tokens());
            match part {
                Part::Bytes { text, range } => {
                    let bytes = &text[range.start + from.min(range.len())..range.start + to.min(range.len())];
                    out.extend(bytes.iter().map(|&byte| u32::from(byte)));
                    out.extend((to > range.len()).then_some(self.end));
                }
                Part::Ids { documents, range } => documents.read(range.start + from..range.start + to, out),
            }
        }
    }

    /// All tokens, end tokens included.
    pub fn tokens(&self) -> Vec<u32> {
        let mut tokens = Vec::new();
        self.read(0..self.len(), &mut tokens);
        tokens
    }

    /// The tokens in order, a block of them at a time.
    fn blocks(&self) -> impl Iterator<Item = Vec<u32>> {
        const BLOCK: usize = 1 << 16;
        (0..self.len()).step_by(BLOCK).map(|from| {
            let mut block = Vec::with_capacity(BLOCK);
            self.read(from..self.len().min(from + BLOCK), &mut block);
            block
        })
    }

    /// An error unless there is one sequence and the token after it.
    pub(super) fn has_a_sequence(&self, what: &str, sequence: usize) -> Result<()> {
        let (have, need) = (self.len(), sequence + 1);
        if have >= need {
            return Ok(());
        }
        let size = if have == 0 { "is empty".into() } else { format!("has {}", count(have, "token")) };
        Err(Error::Data(format!(
            "the {what} text {size}, but one sequence needs {need} tokens (train.sequence_length and the token after it)"
        )))
    }

    /// An error unless a token follows one of the same document.
    pub(super) fn has_a_target(&self, what: &str) -> Result<()> {
        let mut before = self.end;
        for block in self.blocks() {
            for id in block {
                if before != self.end {
                    return Ok(());
                }
                before = id;
            }
        }
        let size = if self.is_empty() { "is empty" } else { "has no two tokens of one document" };
        Err(Error::Data(format!("the {what} text {size}, so there is nothing to predict")))
    }

    /// Entropy of a token by the frequencies of this text itself, end tokens left out, in nats: what a model that knows
    /// only them would lose.
    pub fn unigram_entropy(&self) -> f64 {
        let mut counts = Vec::<u64>::new();
        for id in self.blocks().flatten().filter(|&id| id != self.end) {
            let id = id as usize;
            if id >= counts.len() {
                counts.resize(id + 1, 0);
            }
            counts[id] += 1;
        }
        let total: u64 = counts.iter().sum();
        let p = counts.iter().filter(|&&n| n > 0).map(|&n| n as f64 / total as f64);
        -p.map(|p| p * libm::log(p)).sum::<f64>()
    }

    /// Verifies that the model has every id.
    pub(super) fn check_ids(&self, vocab: usize) -> std::result::Result<(), String> {
        self.parts.iter().try_for_each(|part| match part {
            // Bytes are below 256, which is checked with the configuration.
            Part::Bytes { .. } => Ok(()),
            Part::Ids { documents, .. } => documents.check_ids(vocab),
        })
    }

    /// Adds what the tokens depend on, wherever they lie.
    pub(super) fn hash(&self, hasher: &mut blake3::Hasher) {
        for part in &self.parts {
            let (kind, range) = match part {
                Part::Bytes { range, .. } => (0u8, 0..range.len()),
                Part::Ids { documents, range } => {
                    hasher.update(documents.hash().as_bytes());
                    (1, range.clone())
                }
            };
            hasher.update(&[kind]).update(&(range.start as u64).to_le_bytes());
            hasher.update(&(range.end as u64).to_le_bytes());
            if let Part::Bytes { text, range } = part {
                hasher.update_rayon(&text[range.clone()]);
            }
        }
    }
}
