//! Token ids on disk, as Megatron has them: `NAME.bin` is all ids, one after the other, `NAME.idx` says where sequences
//! and documents begin.
//!
//! ```text
//! NAME.idx, little endian
//!     9 bytes   "MMIDIDX\0\0"
//!     u64       version, 1
//!     u8        type of an id: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16
//!     u64       S, number of sequences
//!     u64       D, number of documents + 1
//!     i32 [S]   ids of each sequence
//!     i64 [S]   first byte of each sequence in NAME.bin: the sum of the sizes before it
//!     i64 [D]   first sequence of each document, and S
//!     i8  [S]   modes of the sequences, in some files; ignored
//! ```

use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;

use super::Bytes;
use crate::error::{Error, Result};

const MAGIC: &[u8] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
/// Where the lengths of the sequences begin.
const HEADER: usize = 34;
/// Ids that a thread looks at before another one may take the next.
const BLOCK: usize = 1 << 20;

/// Documents of which a word knows something.
const WORD: usize = u64::BITS as usize;

/// Type of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdType {
    /// 8 bits without a sign.
    U8,
    /// 8 bits with a sign.
    I8,
    /// 16 bits with a sign.
    I16,
    /// 32 bits with a sign.
    I32,
    /// 64 bits with a sign.
    I64,
    /// 16 bits without a sign.
    U16,
}

impl IdType {
    /// The type in which ids below `ids` are written: the smaller of the two that are in use.
    pub const fn of(ids: usize) -> IdType {
        if ids <= 1 << 16 { IdType::U16 } else { IdType::I32 }
    }

    /// Bytes of an id.
    pub const fn size(self) -> usize {
        match self {
            IdType::U8 | IdType::I8 => 1,
            IdType::I16 | IdType::U16 => 2,
            IdType::I32 => 4,
            IdType::I64 => 8,
        }
    }

    const fn code(self) -> u8 {
        match self {
            IdType::U8 => 1,
            IdType::I8 => 2,
            IdType::I16 => 3,
            IdType::I32 => 4,
            IdType::I64 => 5,
            IdType::U16 => 8,
        }
    }

    fn from_code(code: u8) -> Option<IdType> {
        [IdType::U8, IdType::I8, IdType::I16, IdType::I32, IdType::I64, IdType::U16]
            .into_iter()
            .find(|kind| kind.code() == code)
    }

    /// Appends ids, which fit.
    pub(super) fn write(self, ids: &[u32], out: &mut Vec<u8>) {
        for &id in ids {
            out.extend_from_slice(&u64::from(id).to_le_bytes()[..self.size()]);
        }
    }

    /// The id in these bytes; a negative or larger one is [`u32::MAX`], which no vocabulary has.
    fn read(self, bytes: &[u8]) -> u32 {
        let word = bytes.iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
        let negative = !matches!(self, IdType::U8 | IdType::U16) && bytes.last().is_some_and(|&top| top >= 0x80);
        if negative { u32::MAX } else { u32::try_from(word).unwrap_or(u32::MAX) }
    }
}

/// The header of an index.
pub(super) fn header(kind: IdType, sequences: u64, documents: u64) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.push(kind.code());
    out.extend(sequences.to_le_bytes());
    out.extend((documents + 1).to_le_bytes());
    out
}

/// The index of sequences with these lengths and of documents that end after so many of them.
pub(super) fn index(kind: IdType, lengths: &[u32], ends: &[u64]) -> Vec<u8> {
    let mut out = header(kind, lengths.len() as u64, ends.len() as u64);
    lengths.iter().for_each(|length| out.extend(length.to_le_bytes()));
    let mut pointer = 0u64;
    for &length in lengths {
        out.extend(pointer.to_le_bytes());
        pointer += u64::from(length) * kind.size() as u64;
    }
    [0].iter().chain(ends).for_each(|end| out.extend(end.to_le_bytes()));
    out
}

/// The documents without an end token in the file.
#[derive(Clone, Debug)]
enum Open {
    None,
    All,
    /// A bit for each document, and how many there are before each word of them.
    Some {
        words: Vec<u64>,
        before: Vec<usize>,
    },
}

impl Open {
    fn find(documents: usize, closed: impl Fn(usize) -> bool + Sync) -> Open {
        let word = |word: usize| {
            let of = word * WORD..documents.min((word + 1) * WORD);
            of.rev().fold(0u64, |bits, document| bits << 1 | u64::from(!closed(document)))
        };
        let words: Vec<u64> = (0..documents.div_ceil(WORD)).into_par_iter().map(word).collect();
        let mut all = 0;
        let mut count = |word: &u64| {
            let before = all;
            all += word.count_ones() as usize;
            before
        };
        let before = words.iter().map(&mut count).collect();
        match all {
            0 => Open::None,
            all if all == documents => Open::All,
            _ => Open::Some { words, before },
        }
    }

    fn has(&self, document: usize) -> bool {
        match self {
            Open::None => false,
            Open::All => true,
            Open::Some { words, .. } => words[document / WORD] >> (document % WORD) & 1 == 1,
        }
    }

    /// How many there are before this document.
    fn before(&self, document: usize) -> usize {
        match self {
            Open::None => 0,
            Open::All => document,
            Open::Some { words, before } => {
                let (word, bit) = (document / WORD, document % WORD);
                // After the last of the last word there is none.
                let (word, below) = if word < words.len() { (word, (1 << bit) - 1) } else { (word - 1, u64::MAX) };
                before[word] + (words[word] & below).count_ones() as usize
            }
        }
    }
}

/// Documents as ids.
///
/// Each ends with one end token: a document that has none in the file gets one when it is read.
#[derive(Clone, Debug)]
pub struct Documents {
    ids: Bytes,
    index: Bytes,
    kind: IdType,
    sequences: usize,
    documents: usize,
    open: Open,
    end: u32,
    hash: blake3::Hash,
}

impl Documents {
    /// Maps `NAME.bin` and `NAME.idx`, either of which may be given.
    ///
    /// # Errors
    /// [`Error::Data`] names the file and what is wrong with it; [`Error::Io`].
    pub fn open(path: &Path, end: u32) -> Result<Documents> {
        let [bin, idx] = ["bin", "idx"].map(|extension| path.with_extension(extension));
        Documents::new(Bytes::map(&bin)?, Bytes::map(&idx)?, end)
            .map_err(|what| Error::Data(format!("{}: {what}", idx.display())))
    }

    /// Documents of the contents of the two files, with `end` as the token that ends a document.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn new(ids: Bytes, index: Bytes, end: u32) -> std::result::Result<Documents, String> {
        let number = |at: usize| index.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().unwrap_or_default()));
        if !index.starts_with(MAGIC) {
            return Err("it does not begin as an index (MMIDIDX)".into());
        }
        let short = || format!("it is damaged: {} bytes are no header", index.len());
        let version = number(9).ok_or_else(short)?;
        if version != VERSION {
            return Err(format!("it has version {version}, expected {VERSION}"));
        }
        let code = *index.get(17).ok_or_else(short)?;
        let kind = IdType::from_code(code).ok_or_else(|| {
            format!("its ids have type {code}, expected 1 (u8), 2 (i8), 3 (i16), 4 (i32), 5 (i64) or 8 (u16)")
        })?;
        let (sequences, ends) = (number(18).ok_or_else(short)?, number(26).ok_or_else(short)?);
        let size = |modes: u64| {
            let bytes = sequences.checked_mul(12 + modes)?.checked_add(ends.checked_mul(8)?)?;
            bytes.checked_add(HEADER as u64)
        };
        let found = index.len() as u64;
        if ends == 0 || ![size(0), size(1)].contains(&Some(found)) {
            return Err(format!(
                "it is damaged: it has {found} bytes, which are not {sequences} sequences and {ends} ends"
            ));
        }
        let count = |n: u64| usize::try_from(n).map_err(|_| short());
        let (sequences, documents) = (count(sequences)?, count(ends - 1)?);
        let hash = blake3::Hasher::new().update_rayon(&index).update_rayon(&ids).finalize();
        let mut all = Documents { ids, index, kind, sequences, documents, open: Open::None, end, hash };
        all.check()?;
        let closed = |document| {
            let range = all.span(document);
            range.end.checked_sub(1).is_some_and(|last| last >= range.start && all.id(last) == end)
        };
        all.open = Open::find(documents, closed);
        Ok(all)
    }

    /// Verifies that sequences and documents follow each other.
    fn check(&self) -> std::result::Result<(), String> {
        let mut next = 0usize;
        for sequence in 0..self.sequences {
            let at = HEADER + 4 * sequence;
            let length = i32::from_le_bytes(self.index[at..at + 4].try_into().unwrap_or_default());
            let pointer = self.number(HEADER + 4 * self.sequences + 8 * sequence);
            if pointer != Some(next) {
                return Err(format!("it is damaged: sequence {sequence} does not begin where the one before it ends"));
            }
            let size = usize::try_from(length).ok().and_then(|length| length.checked_mul(self.kind.size()));
            next = size.and_then(|size| next.checked_add(size)).filter(|&next| next <= self.ids.len()).ok_or_else(
                || format!("it is damaged: sequence {sequence} has {length} ids, which the .bin file does not have"),
            )?;
        }
        if next != self.ids.len() {
            return Err(format!("it stands for {next} bytes of ids, but the .bin file has {}", self.ids.len()));
        }
        let mut before = 0;
        for document in 0..=self.documents {
            let at = self.number(HEADER + 12 * self.sequences + 8 * document).unwrap_or(usize::MAX);
            let expected = match document {
                0 => 0..=0,
                last if last == self.documents => self.sequences..=self.sequences,
                _ => before..=self.sequences,
            };
            if !expected.contains(&at) {
                return Err(format!(
                    "it is damaged: document {document} begins with sequence {at}, expected {expected:?}"
                ));
            }
            before = at;
        }
        Ok(())
    }

    /// The number in 8 bytes of the index.
    fn number(&self, at: usize) -> Option<usize> {
        let bytes = self.index.get(at..at + 8)?.try_into().ok()?;
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    }

    /// The first id of a document, or the number of ids for the one after the last.
    fn first(&self, document: usize) -> usize {
        let sequence = self.number(HEADER + 12 * self.sequences + 8 * document).unwrap_or(0);
        let bytes = match sequence == self.sequences {
            true => self.ids.len(),
            false => self.number(HEADER + 4 * self.sequences + 8 * sequence).unwrap_or(0),
        };
        bytes / self.kind.size()
    }

    /// Where a document begins in the stream, or the length of it all for the one after the last.
    fn start(&self, document: usize) -> usize {
        self.first(document) + self.open.before(document)
    }

    /// The ids of a document.
    fn span(&self, document: usize) -> Range<usize> {
        self.first(document)..self.first(document + 1)
    }

    fn id(&self, at: usize) -> u32 {
        let size = self.kind.size();
        self.kind.read(&self.ids[at * size..(at + 1) * size])
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        self.documents
    }

    /// Tokens, end tokens included.
    pub fn tokens(&self) -> usize {
        self.start(self.documents)
    }

    /// Hash of both files.
    pub fn hash(&self) -> blake3::Hash {
        self.hash
    }

    /// Appends the tokens of a range of the stream.
    pub fn read(&self, range: Range<usize>, out: &mut Vec<u32>) {
        // The last document that begins at or before the range; empty ones that begin there, too, come before it.
        let (mut low, mut high) = (0, self.documents);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.start(middle) <= range.start { low = middle } else { high = middle }
        }
        let mut at = range.start;
        for document in low..self.documents {
            if at >= range.end {
                break;
            }
            let span = self.span(document);
            let from = span.start + (at - self.start(document));
            let to = span.end.min(from + (range.end - at));
            out.extend((from..to).map(|id| self.id(id)));
            at += to.saturating_sub(from);
            if at < range.end && self.open.has(document) {
                out.push(self.end);
                at += 1;
            }
        }
    }

    /// Verifies that every id is below `vocab`.
    ///
    /// # Errors
    /// The first one that is not.
    pub fn check_ids(&self, vocab: usize) -> std::result::Result<(), String> {
        let size = self.kind.size();
        let outside = |id: &[u8]| self.kind.read(id) as usize >= vocab;
        let blocks = self.ids.par_chunks(BLOCK * size).enumerate();
        let found =
            blocks.find_map_first(|(block, ids)| ids.chunks_exact(size).position(outside).map(|at| block * BLOCK + at));
        let Some(at) = found else { return Ok(()) };
        let bytes: [u8; 8] = std::array::from_fn(|i| self.ids[at * size..(at + 1) * size].get(i).copied().unwrap_or(0));
        let id = match (self.kind, self.id(at)) {
            (IdType::I64, u32::MAX) => i64::from_le_bytes(bytes).to_string(),
            (_, u32::MAX) => "negative".into(),
            (_, id) => id.to_string(),
        };
        let (mut low, mut high) = (0, self.documents);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.first(middle) <= at { low = middle } else { high = middle }
        }
        let position = at - self.first(low);
        Err(format!("document {low}, position {position}: id {id} is not below model.vocab_size, {vocab}"))
    }
}

impl PartialEq for Documents {
    fn eq(&self, other: &Documents) -> bool {
        (self.hash, self.end) == (other.hash, other.end)
    }
}

impl Eq for Documents {}
