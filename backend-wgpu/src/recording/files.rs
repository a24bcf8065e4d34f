//! A recording's directory. The header is written last, so a directory with one is complete.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use dropless_core::files::{self, FileError};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

use super::format::{FORMAT, FileBytes, Header, Recording, VERSION};

const HEADER: &str = "recording.json";
const PROGRAM: &str = "program.json.gz";
const CONTENTS: &str = "contents.bin.gz";
const SUMS: &str = "sums.bin.gz";
/// The most bytes of a file that is read, uncompressed.
const MOST: u64 = 1 << 32;

/// Why a recording cannot be written, read or replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// A file that cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A directory or file that is no recording, or a damaged one.
    #[error("{}: {what}", path.display())]
    Unfit {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A failure of the device.
    #[error(transparent)]
    Core(#[from] dropless_core::Error),
}

type Result<T> = std::result::Result<T, RecordingError>;

impl From<FileError> for RecordingError {
    fn from(error: FileError) -> RecordingError {
        match error {
            FileError::Io { path, source } => RecordingError::Io { path, source },
            FileError::Unfit { path, what } => RecordingError::Unfit { path, what },
        }
    }
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> RecordingError {
    let path = path.to_owned();
    move |source| RecordingError::Io { path, source }
}

fn unfit(path: &Path, what: impl Into<String>) -> RecordingError {
    RecordingError::Unfit { path: path.to_owned(), what: what.into() }
}

impl Recording {
    /// Whether a recording may be written to `dir`: it is not there, empty, or holds a recording, which is replaced.
    ///
    /// # Errors
    /// [`RecordingError::Unfit`] when it may not.
    pub fn check_place(dir: &Path) -> Result<()> {
        if !dir.exists() || dir.join(HEADER).is_file() {
            return Ok(());
        }
        match fs::read_dir(dir).map_err(failed(dir))?.next() {
            None => Ok(()),
            Some(_) => Err(unfit(dir, "holds something else than a recording; name another directory")),
        }
    }

    /// Writes the files to `dir`, which is made if need be. Returns how many bytes they have.
    ///
    /// # Errors
    /// As [`check_place`](Recording::check_place), and [`RecordingError::Io`].
    pub fn write(&self, dir: &Path) -> Result<u64> {
        Recording::check_place(dir)?;
        fs::create_dir_all(dir).map_err(failed(dir))?;
        let header = dir.join(HEADER);
        match fs::remove_file(&header) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(&header)(e)),
            _ => {}
        }
        let program = serde_json::to_vec(&self.program).expect("plain data");
        let [contents, sums] = [planes(&self.contents), planes(self.sums.as_flattened())];
        let bytes =
            FileBytes { program: program.len() as u64, contents: contents.len() as u64, sums: sums.len() as u64 };
        let mut size = 0;
        for (name, bytes) in [(PROGRAM, program), (CONTENTS, contents), (SUMS, sums)] {
            size += compress(&dir.join(name), &bytes)?;
        }
        let mut text = serde_json::to_vec_pretty(&Header { bytes, ..self.header.clone() }).expect("plain data");
        text.push(b'\n');
        files::replace(&header, &text)?;
        Ok(size + text.len() as u64)
    }

    /// Reads a recording, all of which fits together.
    ///
    /// # Errors
    /// [`RecordingError::Unfit`] for what is no recording, damaged or of another version; [`RecordingError::Io`].
    pub fn read(dir: &Path) -> Result<Recording> {
        let path = dir.join(HEADER);
        let text = files::read(&path, MOST)?;
        let header = header(&path, &text)?;
        let path = dir.join(PROGRAM);
        let program = decompress(&path, header.bytes.program)?;
        let program = serde_json::from_slice(&program).map_err(|error| unfit(&path, format!("damaged: {error}")))?;
        let contents = words(&dir.join(CONTENTS), header.bytes.contents)?;
        let path = dir.join(SUMS);
        let sums = words(&path, header.bytes.sums)?;
        let (pairs, []) = sums.as_chunks() else { return Err(unfit(&path, "damaged: half a pair of sums")) };
        let recording = Recording { header, program, contents, sums: pairs.to_vec() };
        match recording.flaw() {
            None => Ok(recording),
            Some(flaw) => Err(unfit(dir, format!("damaged: {flaw}"))),
        }
    }
}

/// The header of the version that this program reads.
fn header(path: &Path, text: &[u8]) -> Result<Header> {
    let damaged = |error: serde_json::Error| unfit(path, format!("damaged: {error}"));
    let any: serde_json::Value = serde_json::from_slice(text).map_err(damaged)?;
    if any["format"] != FORMAT {
        return Err(unfit(path, format!("format is {}, expected {FORMAT:?}", any["format"])));
    }
    if any["version"] != VERSION {
        return Err(unfit(path, format!("version is {}, and this program reads {VERSION}", any["version"])));
    }
    serde_json::from_value(any).map_err(damaged)
}

/// Bytes of one weight together, the least significant first: exponents compress better among themselves.
fn planes(words: &[u32]) -> Vec<u8> {
    (0..4).flat_map(|byte| words.iter().map(move |word| word.to_le_bytes()[byte])).collect()
}

fn compress(path: &Path, bytes: &[u8]) -> Result<u64> {
    let file = files::create(path)?;
    let write = || -> io::Result<u64> {
        let mut encoder = GzEncoder::new(file, Compression::best());
        encoder.write_all(bytes)?;
        encoder.finish()?.sync_all()?;
        Ok(fs::metadata(path)?.len())
    };
    write().map_err(failed(path))
}

fn decompress(path: &Path, size: u64) -> Result<Vec<u8>> {
    if size > MOST {
        return Err(unfit(path, format!("has {size} bytes, and this program reads {MOST}")));
    }
    let mut bytes = Vec::new();
    let (file, _) = files::open(path)?;
    GzDecoder::new(file)
        .take(size + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| unfit(path, format!("damaged: {error}")))?;
    match bytes.len() as u64 == size {
        true => Ok(bytes),
        false => Err(unfit(path, format!("damaged: the header says {size} bytes, and there are others"))),
    }
}

fn words(path: &Path, size: u64) -> Result<Vec<u32>> {
    let bytes = decompress(path, size)?;
    if !bytes.len().is_multiple_of(4) {
        return Err(unfit(path, "damaged: it ends within a word"));
    }
    let len = bytes.len() / 4;
    Ok((0..len).map(|i| u32::from_le_bytes(std::array::from_fn(|byte| bytes[byte * len + i]))).collect())
}
