//! The contents of a file without a copy in memory of the process.

use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use dropless_core::files;
use memmap2::Mmap;

use crate::error::{Error, Result};

/// Bytes that may be shared: of a mapped file, of memory, or of the program itself.
#[derive(Clone)]
pub struct Bytes(Arc<Held>);

enum Held {
    Mapped(Mmap),
    Memory(Vec<u8>),
    Program(&'static [u8]),
}

impl Bytes {
    /// Maps a regular file. It must stay as it is as long as it is in use: one that becomes shorter ends the process.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for what is no regular file, [`Error::Io`].
    pub fn map(path: &Path) -> Result<Bytes> {
        let (file, size) = files::open(path)?;
        if size == 0 {
            return Ok(Bytes::from(Vec::new()));
        }
        // SAFETY: the bytes are only read, and any value of a byte is one. That the file keeps its length is what the
        // documentation asks of the user; the system ends a process that reads past the end, it never reads other memory.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        Ok(Bytes(Arc::new(Held::Mapped(map))))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &*self.0 {
            Held::Mapped(map) => map,
            Held::Memory(bytes) => bytes,
            Held::Program(bytes) => bytes,
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        Bytes(Arc::new(Held::Memory(bytes)))
    }
}

impl From<&'static str> for Bytes {
    fn from(text: &'static str) -> Bytes {
        Bytes(Arc::new(Held::Program(text.as_bytes())))
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Bytes) -> bool {
        self[..] == other[..]
    }
}

impl Eq for Bytes {}
