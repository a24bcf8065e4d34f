//! Files as they come: only regular ones, and no more of one than makes sense.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use crate::error::{Error, Result};

/// Opens a regular file (or a link to one); returns its size, too. A pipe would hang, and a device has no end.
///
/// # Errors
/// [`Error::Checkpoint`] for what is no regular file, [`Error::Io`].
pub fn open(path: &Path) -> Result<(File, u64)> {
    let metadata = fs::metadata(path).map_err(Error::io(path))?;
    if !metadata.is_file() {
        return Err(Error::checkpoint(path, "is damaged: it is not a regular file"));
    }
    Ok((File::open(path).map_err(Error::io(path))?, metadata.len()))
}

/// The contents of a regular file of at most `most` bytes.
///
/// # Errors
/// [`Error::Checkpoint`] for a larger one and what is no regular file, [`Error::Io`].
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (file, size) = open(path)?;
    if size > most {
        return Err(Error::checkpoint(path, format!("is damaged: it has {size} bytes, expected at most {most}")));
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes).map_err(Error::io(path))?;
    Ok(bytes)
}

/// The same as text.
///
/// # Errors
/// As [`read`]; [`Error::Io`] for what is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> Result<String> {
    let not_text = |e| Error::io(path)(io::Error::new(io::ErrorKind::InvalidData, e));
    String::from_utf8(read(path, most)?).map_err(not_text)
}

/// Memory for `bytes` bytes of a file, all zero.
///
/// # Errors
/// [`Error::Checkpoint`] when it is not there.
pub(super) fn buffer(path: &Path, bytes: usize) -> Result<Vec<u8>> {
    let mut buffer = Vec::new();
    buffer
        .try_reserve_exact(bytes)
        .map_err(|_| Error::checkpoint(path, format!("{bytes} bytes of it do not fit the memory")))?;
    buffer.resize(bytes, 0);
    Ok(buffer)
}
