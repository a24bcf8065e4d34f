//! Files as they come: only regular ones, and no more of one than makes sense.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::Path;

use crate::error::{Error, Result};

/// Opens a regular file (or a link to one); returns its size, too. A pipe would hang, and a device has no end.
///
/// # Errors
/// [`Error::Checkpoint`] for what is no regular file, [`Error::Io`].
pub fn open(path: &Path) -> Result<(File, u64)> {
    let metadata = fs::metadata(path).map_err(Error::io(path))?;
    regular(path, &metadata)?;
    Ok((File::open(path).map_err(Error::io(path))?, metadata.len()))
}

/// Opens a file to read and write it, and makes it if it is not there; returns whether it was made.
///
/// # Errors
/// As [`open`].
pub fn open_or_create(path: &Path) -> Result<(File, bool)> {
    loop {
        match fs::metadata(path) {
            Ok(metadata) => {
                regular(path, &metadata)?;
                match File::options().read(true).write(true).open(path) {
                    // It went in between.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    opened => return Ok((opened.map_err(Error::io(path))?, false)),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                match File::options().read(true).write(true).create_new(true).open(path) {
                    // It came in between; a link that leads nowhere never goes.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists && !path.is_symlink() => {}
                    opened => return Ok((opened.map_err(Error::io(path))?, true)),
                }
            }
            Err(error) => return Err(Error::io(path)(error)),
        }
    }
}

fn regular(path: &Path, metadata: &Metadata) -> Result<()> {
    if metadata.is_file() { Ok(()) } else { Err(Error::checkpoint(path, "is damaged: it is not a regular file")) }
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
    let mut buffer = reserved(path, bytes)?;
    buffer.resize(bytes, 0);
    Ok(buffer)
}

/// Memory for `len` values of a file.
///
/// # Errors
/// [`Error::Checkpoint`] when it is not there.
pub(super) fn reserved<T>(path: &Path, len: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| {
        let bytes = len.saturating_mul(size_of::<T>());
        Error::checkpoint(path, format!("{bytes} bytes of it do not fit the memory"))
    })?;
    Ok(values)
}
