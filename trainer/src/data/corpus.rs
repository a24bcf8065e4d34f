//! Documents as token ids, from files, from the embedded corpus, or from given ids.

use std::fs;

use dropless_model::words::count;

use crate::config::{Config, Tokenizer};
use crate::error::{Error, Result};

/// The end of a document; ids below it are bytes.
pub const END: u32 = Tokenizer::Byte.end();

/// The text of runs without files: see `trainer/data/README.md`.
const EMBEDDED: &str = include_str!("../../data/shakespeare.txt");

/// A document of the embedded text ends with the first blank line from this many bytes on.
const EMBEDDED_DOCUMENT: usize = 8192;

/// Documents, one after the other, each closed by an end token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corpus {
    pub(super) tokens: Vec<u32>,
    pub(super) end: u32,
}

/// The name and text of a document.
type Document = (String, Vec<u8>);

impl Corpus {
    /// The training and the validation text of a configuration.
    ///
    /// Without validation files, the last part of each document is set aside: `validation_fraction` of its bytes,
    /// rounded down. So the two never share a byte, and the split depends on nothing else.
    ///
    /// # Errors
    /// [`Error::Data`] for a bad pattern, one that matches nothing, a file that cannot be read, or a text that is shorter
    /// than one sequence.
    pub fn load(config: &Config) -> Result<(Corpus, Corpus)> {
        let (data, sequence) = (&config.data, config.train.sequence_length);
        let mut train = if data.train.is_empty() { embedded() } else { read(&data.train)? };
        let mut validation = Vec::new();
        if data.validation.is_empty() {
            for (name, text) in &mut train {
                let aside = text.len() - set_aside(text.len(), data.validation_fraction);
                validation.push((name.clone(), text.split_off(aside)));
            }
        } else {
            validation = read(&data.validation)?;
        }
        let texts =
            [train, validation].map(|documents| Corpus::from_bytes(documents.into_iter().map(|(_, text)| text)));
        let [train, validation] = texts;
        train.has_a_sequence("training", sequence)?;
        validation.has_a_sequence("validation", sequence)?;
        Ok((train, validation))
    }

    /// An error unless there is one sequence and the token after it.
    pub(super) fn has_a_sequence(&self, what: &str, sequence: usize) -> Result<()> {
        let (have, need) = (self.tokens.len(), sequence + 1);
        if have >= need {
            return Ok(());
        }
        let size = if have == 0 { "is empty".into() } else { format!("has {}", count(have, "token")) };
        Err(Error::Data(format!(
            "the {what} text {size}, but one sequence needs {need} tokens (train.sequence_length and the token after it)"
        )))
    }

    /// Documents of bytes. Empty ones are left out.
    pub fn from_bytes(documents: impl IntoIterator<Item = Vec<u8>>) -> Corpus {
        let mut tokens = Vec::new();
        for text in documents.into_iter().filter(|text| !text.is_empty()) {
            tokens.extend(text.iter().map(|&b| u32::from(b)));
            tokens.push(END);
        }
        Corpus { tokens, end: END }
    }

    /// Documents of ids below `vocab`, each closed by `end` here.
    ///
    /// # Errors
    /// [`Error::Data`] names the document and the position of an id that is too large.
    pub fn from_ids(documents: &[Vec<u32>], end: u32, vocab: usize) -> Result<Corpus> {
        let mut tokens = Vec::new();
        for (document, ids) in documents.iter().enumerate() {
            if let Some(position) = ids.iter().position(|&id| id as usize >= vocab) {
                return Err(Error::Data(format!(
                    "document {document}, position {position}: id {} is not below model.vocab_size, {vocab}",
                    ids[position]
                )));
            }
            tokens.extend(ids);
            tokens.push(end);
        }
        Ok(Corpus { tokens, end })
    }

    /// Token ids, end tokens included.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Entropy of a byte by the frequencies of this text itself, in nats: what a model that knows only them would lose.
    pub fn unigram_entropy(&self) -> f64 {
        let mut counts = [0u64; 256];
        for &id in &self.tokens {
            if let Some(count) = counts.get_mut(id as usize) {
                *count += 1;
            }
        }
        let total: u64 = counts.iter().sum();
        let p = counts.iter().filter(|&&n| n > 0).map(|&n| n as f64 / total as f64);
        -p.map(|p| p * libm::log(p)).sum::<f64>()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a part of a length in memory, rounded down")]
fn set_aside(len: usize, fraction: f64) -> usize {
    (len as f64 * fraction) as usize
}

/// The embedded text in pieces: between two speeches, about 8 KiB each.
fn embedded() -> Vec<Document> {
    let (mut documents, mut rest) = (Vec::new(), EMBEDDED);
    while !rest.is_empty() {
        let blank = rest.get(EMBEDDED_DOCUMENT..).and_then(|tail| tail.find("\n\n"));
        let (document, after) = rest.split_at(blank.map_or(rest.len(), |at| EMBEDDED_DOCUMENT + at + 2));
        documents.push((format!("embedded {}", documents.len()), document.as_bytes().to_vec()));
        rest = after;
    }
    documents
}

/// The files that the patterns match, in the order of their names, each once.
fn read(patterns: &[String]) -> Result<Vec<Document>> {
    let mut files = Vec::new();
    for pattern in patterns {
        let paths = glob::glob(pattern).map_err(|e| Error::Data(format!("pattern {pattern:?}: {e}")))?;
        let before = files.len();
        for path in paths {
            let path = path.map_err(|e| Error::Data(e.to_string()))?;
            if path.is_file() {
                files.push(path);
            }
        }
        if files.len() == before {
            return Err(Error::Data(format!("pattern {pattern:?} matches no file")));
        }
    }
    files.sort();
    files.dedup();
    let document = |path: std::path::PathBuf| match fs::read(&path) {
        Ok(text) => Ok((path.display().to_string(), text)),
        Err(e) => Err(Error::Data(format!("{}: {e}", path.display()))),
    };
    files.into_iter().map(document).collect()
}
