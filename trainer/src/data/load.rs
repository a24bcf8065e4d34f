//! The texts of a configuration: files to [`Corpus`], and what of them is held out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::prepare::{self, Job};
use super::{Bytes, Corpus, Documents, Mixture, Tokenizer, files};
use crate::config::{Config, DataConfig, Format, Set, Source};
use crate::error::{Error, Result};

/// The text of runs without files: see `trainer/data/README.md`.
const EMBEDDED: &str = include_str!("../../data/shakespeare.txt");

/// A document of the embedded text ends with the first blank line from this many bytes on.
const EMBEDDED_DOCUMENT: usize = 8192;

/// Text that has to go through a tokenizer may have this many bytes in a source; it becomes ids in memory each time a run
/// starts.
const IN_MEMORY: u64 = 256 << 20;

/// What a run is trained and validated on.
#[derive(Debug)]
pub struct Texts {
    /// The training text.
    pub train: Arc<Mixture>,
    /// The validation sets, by name.
    pub validation: Vec<(String, Corpus)>,
    /// What makes ids of text.
    pub tokenizer: Tokenizer,
    /// What the tokens are.
    pub record: TextRecord,
}

/// Hashes of the tokens of a run, as its checkpoints have them. Where the texts lie is no part of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextRecord {
    /// Of the training text: sources, shares, order of the documents, tokenizer.
    pub train: String,
    /// Of each validation set.
    pub validation: BTreeMap<String, String>,
}

impl TextRecord {
    /// Verifies that a run that began with this text may go on with `next`.
    ///
    /// # Errors
    /// [`Error::Data`] names the text that has changed, with both hashes.
    pub fn check_continues_as(&self, next: &TextRecord) -> Result<()> {
        let names: BTreeSet<&String> = self.validation.keys().chain(next.validation.keys()).collect();
        let sets = names.into_iter().map(|name| {
            let of = |record: &TextRecord| record.validation.get(name).cloned();
            (format!("the validation text {name:?}"), of(self), of(next))
        });
        let train = ("the training text".to_owned(), Some(self.train.clone()), Some(next.train.clone()));
        for (what, before, now) in [train].into_iter().chain(sets) {
            if before != now {
                let [before, now] = [before, now].map(|hash| hash.unwrap_or_else(|| "absent".into()));
                return Err(Error::Data(format!(
                    "{what} is {now}, but the checkpoint was made with {before} (BLAKE3)"
                )));
            }
        }
        Ok(())
    }

    /// All of it in one hash.
    pub fn hash(&self) -> blake3::Hash {
        blake3::hash(&serde_json::to_vec(self).unwrap_or_else(|e| unreachable!("plain data: {e}")))
    }
}

/// The documents of a source, before anything is held out.
enum Read {
    /// Each file is a document of bytes.
    Bytes(Vec<Bytes>),
    /// Tokens of whatever files.
    Tokens(Corpus),
}

impl Texts {
    /// The texts of a configuration.
    ///
    /// Without validation sets, `validation_fraction` of the training text is set aside, rounded down: of files that are
    /// documents of bytes the last part of each, of everything else the last tokens of each source. So the two never
    /// share a byte, and the split depends on nothing else.
    ///
    /// # Errors
    /// [`Error::Data`] for a bad pattern, one that matches nothing, a file that cannot be used, ids that the model does not
    /// have, or a text that is shorter than one sequence; [`Error::Io`]; [`Error::Config`] for a vocabulary that is too
    /// small.
    pub fn load(config: &Config) -> Result<Texts> {
        Texts::with(config, Tokenizer::open(&config.data.tokenizer)?)
    }

    /// The same with the configuration's tokenizer, which is open.
    ///
    /// # Errors
    /// As [`load`](Texts::load).
    pub(crate) fn with(config: &Config, tokenizer: Tokenizer) -> Result<Texts> {
        let (data, sequence) = (&config.data, config.train.sequence_length);
        let vocab = config.model.architecture().vocab;
        tokenizer.check(vocab, &data.tokenizer)?;
        let read = |paths: &[String], format, field: &str| {
            let text = read(&tokenizer, &files::matching(paths)?, format, field)?;
            if let Read::Tokens(corpus) = &text {
                corpus.check_ids(vocab).map_err(|what| Error::Data(format!("{}: {what}", paths.join(", "))))?;
            }
            Ok::<Read, Error>(text)
        };
        let sets = data.validation_sets();
        let fraction = if sets.is_empty() { data.validation_fraction } else { 0.0 };
        let (mut train, mut aside) = (Vec::new(), Vec::new());
        for Source { paths, format, field, weight } in data.sources() {
            let (kept, held_out) = hold_out(read(&paths, format, &field)?, &tokenizer, fraction);
            train.push((kept, weight));
            aside.push(held_out);
        }
        if train.is_empty() {
            let text = embedded(&tokenizer)?;
            let (kept, held_out) = hold_out(text, &tokenizer, fraction);
            train.push((kept, 1.0));
            aside.push(held_out);
        }
        let mut validation = Vec::new();
        for Set { name, paths, format, field } in sets {
            validation.push((name, hold_out(read(&paths, format, &field)?, &tokenizer, 0.0).0));
        }
        if validation.is_empty() {
            validation.push((DataConfig::VALIDATION.to_owned(), Corpus::join(aside, tokenizer.end())));
        }
        for (source, (corpus, _)) in train.iter().enumerate() {
            let what = if train.len() == 1 { "training".into() } else { format!("training source {source}'s") };
            corpus.has_a_sequence(&what, sequence)?;
        }
        for (name, corpus) in &validation {
            let what = if name == DataConfig::VALIDATION { name.clone() } else { format!("validation set {name:?}'s") };
            corpus.has_a_target(&what)?;
        }
        let train = Mixture::new(train);
        let hash = |add: &dyn Fn(&mut blake3::Hasher)| {
            let mut hasher = blake3::Hasher::new();
            tokenizer.hash(&mut hasher);
            add(&mut hasher);
            hasher.finalize().to_hex().to_string()
        };
        let record = TextRecord {
            train: hash(&|hasher| train.hash(hasher)),
            validation: validation.iter().map(|(name, corpus)| (name.clone(), hash(&|h| corpus.hash(h)))).collect(),
        };
        Ok(Texts { train: Arc::new(train), validation, tokenizer, record })
    }
}

/// The documents of files, which are all of one format.
fn read(tokenizer: &Tokenizer, paths: &[PathBuf], format: Option<Format>, field: &str) -> Result<Read> {
    let formats: BTreeSet<_> = paths.iter().map(|path| format.unwrap_or_else(|| files::format(path)) as u8).collect();
    let first = paths.first().map_or(Format::Text, |path| format.unwrap_or_else(|| files::format(path)));
    if formats.len() > 1 {
        let names = paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
        return Err(Error::Data(format!("a source has files of one format, but these are of several: {names}")));
    }
    match first {
        Format::Indexed => {
            // A pair of files may be named by either.
            let stems: BTreeSet<PathBuf> = paths.iter().map(|path| path.with_extension("idx")).collect();
            let open = |path: &PathBuf| {
                let documents = Documents::open(path, tokenizer.end())?;
                Ok(Corpus::of_documents(Arc::new(documents), tokenizer.end()))
            };
            let all = stems.iter().map(open).collect::<Result<_>>()?;
            Ok(Read::Tokens(Corpus::join(all, tokenizer.end())))
        }
        Format::Text if matches!(tokenizer, Tokenizer::Byte) => {
            Ok(Read::Bytes(paths.iter().map(|path| Bytes::map(path)).collect::<Result<_>>()?))
        }
        Format::Text | Format::Jsonl => {
            let job = Job::new(tokenizer, paths.to_vec(), format, field, false)?;
            if job.bytes() > IN_MEMORY {
                let names = paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
                let more = if names.len() > 1 { format!(" and {} more", names.len() - 1) } else { String::new() };
                return Err(Error::Data(format!(
                    "{}{more}: {} MiB of text are too much to be tokenized at each start (at most {}): prepare it once \
                     with dropless tokenize and name the .bin file",
                    names.first().map_or("", String::as_str),
                    job.bytes() >> 20,
                    IN_MEMORY >> 20
                )));
            }
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let documents = prepare::in_memory(&job, threads)?;
            Ok(Read::Tokens(Corpus::of_documents(Arc::new(documents), tokenizer.end())))
        }
    }
}

/// What is trained on, and what is set aside.
fn hold_out(text: Read, tokenizer: &Tokenizer, fraction: f64) -> (Corpus, Corpus) {
    match text {
        Read::Bytes(documents) => {
            let (mut kept, mut aside) = (Vec::new(), Vec::new());
            for text in documents {
                let middle = text.len() - part(text.len(), fraction);
                let all = text.len();
                kept.push((text.clone(), 0..middle));
                aside.push((text, middle..all));
            }
            (Corpus::of_bytes(kept), Corpus::of_bytes(aside))
        }
        Read::Tokens(corpus) if fraction == 0.0 => (corpus, Corpus::join(Vec::new(), tokenizer.end())),
        Read::Tokens(corpus) => {
            let middle = corpus.len() - part(corpus.len(), fraction);
            corpus.split(middle)
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a length, rounded down")]
fn part(len: usize, fraction: f64) -> usize {
    (len as f64 * fraction) as usize
}

/// The embedded text in pieces: between two speeches, about 8 KiB each.
fn embedded(tokenizer: &Tokenizer) -> Result<Read> {
    let (mut documents, mut rest) = (Vec::new(), EMBEDDED);
    while !rest.is_empty() {
        let blank = rest.get(EMBEDDED_DOCUMENT..).and_then(|tail| tail.find("\n\n"));
        let (document, after) = rest.split_at(blank.map_or(rest.len(), |at| EMBEDDED_DOCUMENT + at + 2));
        documents.push(document);
        rest = after;
    }
    if let Tokenizer::Byte = tokenizer {
        return Ok(Read::Bytes(documents.into_iter().map(Bytes::from).collect()));
    }
    let ids = documents.iter().map(|text| tokenizer.encode(text).map_err(Error::Data)).collect::<Result<Vec<_>>>()?;
    Ok(Read::Tokens(Corpus::from_ids(&ids, tokenizer.end(), tokenizer.ids())?))
}
