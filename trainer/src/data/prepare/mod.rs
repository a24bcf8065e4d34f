//! Files to token ids: several threads take chunks of the text, whose bounds depend on the text alone, and the results
//! come in the order of the text. So neither the number of threads nor a stop on the way changes a byte of what is made.
//!
//! [`in_memory`] is for small texts, [`to_disk`] writes the files of [`super::indexed`].

mod disk;

pub use disk::{Prepared, to_disk};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

use super::indexed::{self, IdType};
use super::tokenizer::{PIECE, Tokenizer, cut, pieces};
use super::{Bytes, Documents, files, jsonl};
use crate::config::Format;
use crate::error::{Error, Result};

/// Bytes of text that a thread takes at once: a whole number of pieces.
const CHUNK: usize = 8 * PIECE;

/// What some programs put at the beginning of a file to say that it is UTF-8; it is no JSON.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Texts to be made ids of.
#[derive(Debug)]
pub struct Job<'t> {
    tokenizer: &'t Tokenizer,
    inputs: Vec<Input>,
    /// Whether each document gets its end token.
    close: bool,
    field: String,
    chunks: Vec<Chunk>,
}

#[derive(Debug)]
struct Input {
    path: PathBuf,
    text: Bytes,
    format: Format,
}

/// The n-th chunk of an input.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    input: usize,
    number: usize,
}

/// What became of a chunk.
struct Encoded {
    ids: Vec<u8>,
    /// Ids of each sequence; a long document has several.
    lengths: Vec<u32>,
    /// Sequences of this chunk after which a document ends.
    ends: Vec<usize>,
}

impl<'t> Job<'t> {
    /// The documents of these files, in their order; what a file is, its name says unless `format` does.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::Data`] for a file that holds ids already.
    pub fn new(
        tokenizer: &'t Tokenizer,
        paths: Vec<PathBuf>,
        format: Option<Format>,
        field: &str,
        close: bool,
    ) -> Result<Job<'t>> {
        let (mut inputs, mut chunks) = (Vec::new(), Vec::new());
        for path in paths {
            let format = format.unwrap_or_else(|| files::format(&path));
            if format == Format::Indexed {
                return Err(Error::Data(format!("{}: it holds token ids, not text", path.display())));
            }
            let text = Bytes::map(&path)?;
            let input = inputs.len();
            chunks.extend((0..text.len().div_ceil(CHUNK)).map(|number| Chunk { input, number }));
            inputs.push(Input { path, text, format });
        }
        Ok(Job { tokenizer, inputs, close, field: field.to_owned(), chunks })
    }

    /// Bytes of text.
    pub fn bytes(&self) -> u64 {
        self.inputs.iter().map(|input| input.text.len() as u64).sum()
    }

    /// Hash of everything that the result depends on.
    fn hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        self.tokenizer.hash(&mut hasher);
        hasher.update(&[u8::from(self.close)]).update(self.field.as_bytes());
        for Input { text, format, .. } in &self.inputs {
            hasher.update(&[u8::from(*format == Format::Jsonl)]).update(&(text.len() as u64).to_le_bytes());
            hasher.update_rayon(text);
        }
        hasher.finalize()
    }

    fn id_type(&self) -> IdType {
        IdType::of(self.tokenizer.ids())
    }

    /// Bytes of the text up to the end of this chunk.
    fn bytes_until(&self, chunk: usize) -> u64 {
        let Some(&Chunk { input, number }) = self.chunks.get(chunk) else { return 0 };
        let before: u64 = self.inputs[..input].iter().map(|input| input.text.len() as u64).sum();
        before + self.inputs[input].text.len().min((number + 1) * CHUNK) as u64
    }

    fn encode(&self, chunk: Chunk) -> Result<Encoded> {
        let input = &self.inputs[chunk.input];
        let mut out = Encoder { job: self, out: Encoded { ids: Vec::new(), lengths: Vec::new(), ends: Vec::new() } };
        match input.format {
            Format::Jsonl => out.lines(input, chunk.number)?,
            _ => out.text(input, chunk.number)?,
        }
        Ok(out.out)
    }

    /// Gives what became of each chunk from `first` on to `sink`, in order. The failure that is reported is the first in
    /// the order of the text.
    fn run(&self, first: usize, threads: usize, sink: &mut dyn FnMut(usize, Encoded) -> Result<()>) -> Result<()> {
        let threads = threads.clamp(1, self.chunks.len().saturating_sub(first).max(1));
        let queue = Mutex::new(Queue { next: first, wanted: first, done: BTreeMap::new(), stopped: false });
        let changed = Condvar::new();
        let locked = || queue.lock().unwrap_or_else(PoisonError::into_inner);
        let work = || {
            loop {
                let mut state = locked();
                // Results that wait for an earlier one take memory.
                while !state.stopped && state.next >= state.wanted + 2 * threads {
                    state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                let at = state.next;
                let Some(&chunk) = self.chunks.get(at).filter(|_| !state.stopped) else { return };
                state.next += 1;
                drop(state);
                let encoded = self.encode(chunk);
                locked().done.insert(at, encoded);
                changed.notify_all();
            }
        };
        thread::scope(|scope| {
            let mut result = Ok(());
            let mut workers = Vec::new();
            for _ in 0..threads {
                match thread::Builder::new().name("tokenize".into()).spawn_scoped(scope, work) {
                    Ok(worker) => workers.push(worker),
                    Err(error) => result = Err(Error::thread("tokenizing")(error)),
                }
            }
            for at in first..self.chunks.len() {
                if result.is_err() {
                    break;
                }
                let mut state = locked();
                let encoded = loop {
                    if let Some(encoded) = state.done.remove(&at) {
                        break encoded;
                    }
                    state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                };
                state.wanted = at + 1;
                drop(state);
                changed.notify_all();
                result = encoded.and_then(|encoded| sink(at, encoded));
            }
            locked().stopped = true;
            changed.notify_all();
            for worker in workers {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
            result
        })
    }
}

/// What the threads share.
struct Queue {
    /// The next chunk to be taken.
    next: usize,
    /// The chunk that the sink waits for.
    wanted: usize,
    done: BTreeMap<usize, Result<Encoded>>,
    stopped: bool,
}

/// A chunk under way.
struct Encoder<'j, 't> {
    job: &'j Job<'t>,
    out: Encoded,
}

impl Encoder<'_, '_> {
    /// A chunk of a file that is one document: the pieces that begin in it.
    fn text(&mut self, input: &Input, number: usize) -> Result<()> {
        let text = &input.text;
        let first = number * (CHUNK / PIECE);
        let last = (first + CHUNK / PIECE).min(text.len().div_ceil(PIECE));
        for piece in first..last {
            let range = cut(text, piece * PIECE)..cut(text, (piece + 1) * PIECE);
            let at = range.start;
            self.sequence(&text[range], piece == 0)
                .map_err(|what| Error::Data(format!("{}: from byte {at} on: {what}", input.path.display())))?;
        }
        if last * PIECE >= text.len() {
            self.end(0, number > 0);
        }
        Ok(())
    }

    /// A chunk of a file of lines: those that begin in it.
    fn lines(&mut self, input: &Input, number: usize) -> Result<()> {
        let text = &input.text;
        let mut at = line_from(text, number * CHUNK);
        if at == 0 && text.starts_with(BYTE_ORDER_MARK) {
            at = BYTE_ORDER_MARK.len();
        }
        let until = line_from(text, (number + 1) * CHUNK);
        while at < until {
            let end = text[at..].iter().position(|&byte| byte == b'\n').map_or(text.len(), |n| at + n);
            let line = text[at..end].trim_ascii();
            if !line.is_empty() {
                self.line(line).map_err(|what| {
                    let line = text[..at].iter().filter(|&&byte| byte == b'\n').count() + 1;
                    Error::Data(format!("{}:{line}: {what}", input.path.display()))
                })?;
            }
            at = end + 1;
        }
        Ok(())
    }

    fn line(&mut self, line: &[u8]) -> std::result::Result<(), String> {
        let text = jsonl::text(line, &self.job.field)?;
        let before = self.out.lengths.len();
        for (number, piece) in pieces(text.as_bytes(), PIECE).enumerate() {
            self.sequence(&text.as_bytes()[piece], number == 0)?;
        }
        self.end(before, false);
        Ok(())
    }

    fn sequence(&mut self, piece: &[u8], first: bool) -> std::result::Result<(), String> {
        let ids = self.job.tokenizer.encode_piece(piece, first)?;
        if !ids.is_empty() {
            self.job.id_type().write(&ids, &mut self.out.ids);
            self.out.lengths.push(u32::try_from(ids.len()).map_err(|e| e.to_string())?);
        }
        Ok(())
    }

    /// Ends the document whose sequences of this chunk come after the first `before`; it may have `earlier` ones. One that
    /// has none is left out.
    fn end(&mut self, before: usize, earlier: bool) {
        let own = self.out.lengths.len() > before;
        if !own && !earlier {
            return;
        }
        if self.job.close {
            let mut end = Vec::new();
            self.job.id_type().write(&[self.job.tokenizer.end()], &mut end);
            match self.out.lengths.last_mut().filter(|_| own) {
                // A text may spell it out.
                Some(_) if self.out.ids.ends_with(&end) => {}
                Some(length) => {
                    *length += 1;
                    self.out.ids.extend(end);
                }
                None => {
                    self.out.lengths.push(1);
                    self.out.ids.extend(end);
                }
            }
        }
        self.out.ends.push(self.out.lengths.len());
    }
}

/// The first line that begins at `from` or later.
fn line_from(text: &[u8], from: usize) -> usize {
    let Some(before) = from.checked_sub(1) else { return 0 };
    let newline = text.get(before..).and_then(|rest| rest.iter().position(|&byte| byte == b'\n'));
    newline.map_or(text.len(), |at| from + at)
}

/// How far the result has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Extent {
    /// Bytes of ids.
    ids: u64,
    sequences: u64,
    documents: u64,
    /// Sequences up to the end of the last document.
    ended: u64,
}

impl Extent {
    /// Adds a chunk; returns the ends of its documents, counted from the beginning. A document without ids is left out.
    fn add(&mut self, chunk: &Encoded) -> Vec<u64> {
        let mut ends = Vec::with_capacity(chunk.ends.len());
        for &end in &chunk.ends {
            let end = self.sequences + end as u64;
            if end > self.ended {
                ends.push(end);
                self.ended = end;
            }
        }
        self.ids += chunk.ids.len() as u64;
        self.sequences += chunk.lengths.len() as u64;
        self.documents += ends.len() as u64;
        ends
    }
}

/// Documents in memory.
///
/// # Errors
/// [`Error::Data`] names the file and the line or byte with which something is wrong.
pub fn in_memory(job: &Job<'_>, threads: usize) -> Result<Documents> {
    let (mut ids, mut lengths, mut ends) = (Vec::new(), Vec::new(), Vec::new());
    let mut extent = Extent::default();
    job.run(0, threads, &mut |_, chunk| {
        ends.extend(extent.add(&chunk));
        ids.extend(chunk.ids);
        lengths.extend(chunk.lengths);
        Ok(())
    })?;
    let index = indexed::index(job.id_type(), &lengths, &ends);
    Documents::new(ids.into(), index.into(), job.tokenizer.end()).map_err(Error::Data)
}

/// `PREFIX` and an extension, which replaces none.
fn with_extension(prefix: &Path, extension: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(extension);
    name.into()
}
