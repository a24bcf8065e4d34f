//! A file that stays the one that was opened: what was checked is what is read, even when its name is gone by then. A run
//! that goes on removes its old checkpoints, also one that another process reads.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use dropless_core::files;

use super::tensors::FileRecord;
use crate::error::{Error, Result};

/// Bytes that are hashed at once.
const BLOCK: u64 = 1 << 20;

/// A regular file that is open to be read, from wherever it is needed.
#[derive(Debug)]
pub struct OpenFile {
    path: PathBuf,
    file: Mutex<File>,
    bytes: u64,
}

impl OpenFile {
    /// Opens it.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for what is no regular file, [`Error::Io`].
    pub fn open(path: &Path) -> Result<OpenFile> {
        let (file, bytes) = files::open(path)?;
        Ok(OpenFile { path: path.to_owned(), file: Mutex::new(file), bytes })
    }

    /// The name under which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The size that it had then.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills `buffer` with what is there from byte `from` on.
    ///
    /// # Errors
    /// [`Error::Io`], also when the file has become shorter.
    pub fn read_at(&self, from: u64, buffer: &mut [u8]) -> Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(from)).and_then(|_| file.read_exact(buffer)).map_err(Error::io(&self.path))
    }

    /// All of it.
    ///
    /// # Errors
    /// As [`read_at`](OpenFile::read_at), and for memory that is not there.
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut contents = files::buffer(&self.path, self.bytes)?;
        self.read_at(0, &mut contents)?;
        Ok(contents)
    }

    /// Its record.
    ///
    /// # Errors
    /// As [`read_at`](OpenFile::read_at).
    pub fn record(&self) -> Result<FileRecord> {
        let mut hasher = blake3::Hasher::new();
        let mut block = files::buffer(&self.path, BLOCK.min(self.bytes))?;
        let mut at = 0;
        while at < self.bytes {
            let length = usize::try_from(self.bytes - at).map_or(block.len(), |left| left.min(block.len()));
            let part = &mut block[..length];
            self.read_at(at, part)?;
            hasher.update(part);
            at += part.len() as u64;
        }
        Ok(FileRecord { bytes: self.bytes, blake3: hasher.finalize().to_hex().to_string() })
    }
}
