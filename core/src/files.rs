//! Files as they come. Whatever may have been put in a file's place, only a regular one is opened: a pipe would hang, and a
//! device has no end. No more of one is read than makes sense, into memory that is asked for. What replaces a file does so
//! whole and safely on disk, or not at all.
//!
//! Everything in the program that opens a file does it here.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use crate::escape::escaped;

/// Why a file is not opened, read or written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It is no file that the program would read.
    #[error("{}: {what}", name(path))]
    Unfit {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The system refuses.
    #[error("{}: {source}", name(path))]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// A result with a [`FileError`].
pub type Result<T> = std::result::Result<T, FileError>;

fn name(path: &Path) -> String {
    escaped(&path.display().to_string()).to_string()
}

fn unfit(path: &Path, what: impl Into<String>) -> FileError {
    FileError::Unfit { path: path.to_owned(), what: what.into() }
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError::Io { path, source }
}

fn not_regular(path: &Path) -> FileError {
    unfit(path, "is damaged: it is not a regular file")
}

/// Opens a regular file (or a link to one) to read it; returns its size, too.
///
/// # Errors
/// [`FileError`].
pub fn open(path: &Path) -> Result<(File, u64)> {
    // Asked before it is opened: to open a pipe is to wait for who writes into it.
    if !fs::metadata(path).map_err(failed(path))?.is_file() {
        return Err(not_regular(path));
    }
    let file = File::open(path).map_err(failed(path))?;
    let opened = file.metadata().map_err(failed(path))?;
    if opened.is_file() { Ok((file, opened.len())) } else { Err(not_regular(path)) }
}

/// The contents of a regular file of at most `most` bytes.
///
/// # Errors
/// [`FileError`].
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (mut file, size) = open(path)?;
    if size > most {
        return Err(unfit(path, format!("is damaged: it has {size} bytes, expected at most {most}")));
    }
    let mut bytes = buffer(path, size)?;
    file.read_exact(&mut bytes).map_err(failed(path))?;
    Ok(bytes)
}

/// The same as text.
///
/// # Errors
/// [`FileError`], also for what is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> Result<String> {
    String::from_utf8(read(path, most)?).map_err(|e| unfit(path, format!("is damaged: it is not UTF-8: {e}")))
}

/// Memory for so many bytes of a file, all zero.
///
/// # Errors
/// [`FileError::Unfit`] when it is not there.
pub fn buffer(path: &Path, bytes: u64) -> Result<Vec<u8>> {
    let mut buffer: Vec<u8> = room(path, bytes)?;
    buffer.extend(std::iter::repeat_n(0, usize::try_from(bytes).unwrap_or(buffer.capacity())));
    Ok(buffer)
}

/// Memory for `count` values of a file, none of which is there yet.
///
/// # Errors
/// [`FileError::Unfit`] when it is not there.
pub fn room<T>(path: &Path, count: u64) -> Result<Vec<T>> {
    let mut room = Vec::new();
    let reserved = usize::try_from(count).is_ok_and(|count| room.try_reserve_exact(count).is_ok());
    match reserved {
        true => Ok(room),
        false => Err(unfit(path, format!("{count} values of {} bytes do not fit the memory", size_of::<T>()))),
    }
}

/// Opens a file to write it anew.
///
/// # Errors
/// [`FileError`], also for something else in its place.
pub fn create(path: &Path) -> Result<File> {
    regular_or_absent(path)?;
    File::create(path).map_err(failed(path))
}

/// Opens a file to read and change it; one that is not there is made.
///
/// # Errors
/// [`FileError`], also for something else in its place.
pub fn change(path: &Path) -> Result<File> {
    regular_or_absent(path)?;
    let options = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
    options.map_err(failed(path))
}

/// Makes a file that is not there, to read and change it; None if something is there already.
///
/// # Errors
/// [`FileError::Io`].
pub fn make(path: &Path) -> Result<Option<File>> {
    match OpenOptions::new().create_new(true).read(true).write(true).open(path) {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(None),
        Err(e) => Err(failed(path)(e)),
    }
}

fn regular_or_absent(path: &Path) -> Result<()> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(()),
        Ok(_) => Err(not_regular(path)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(failed(path)(e)),
    }
}

/// Gives a file these contents: it has the old or the new ones, whole, whatever ends the program or the machine.
///
/// # Errors
/// [`FileError`], also for something else in its place.
pub fn replace(path: &Path, contents: &[u8]) -> Result<()> {
    replace_with(path, |file| file.write_all(contents))
}

/// Tries out whether there can be such a file, and leaves nothing behind.
///
/// # Errors
/// As [`replace`].
pub fn replaceable(path: &Path) -> Result<()> {
    regular_or_absent(path)?;
    let temporary = beside(path);
    drop(create(&temporary)?);
    fs::remove_file(&temporary).map_err(failed(&temporary))
}

/// Where the new contents of a file are written first.
fn beside(path: &Path) -> PathBuf {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    temporary.into()
}

/// The same as [`replace`] with contents that `write` writes.
///
/// # Errors
/// As [`replace`].
pub fn replace_with(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<()> {
    regular_or_absent(path)?;
    let temporary = beside(path);
    let mut file = create(&temporary)?;
    let written = write(&mut file).and_then(|()| file.sync_all()).map_err(failed(&temporary));
    written.and_then(|()| fs::rename(&temporary, path).map_err(failed(path))).inspect_err(|_| {
        // A full disk need not keep the half of it.
        let _ = fs::remove_file(&temporary);
    })?;
    sync_directory(path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")))
}

/// Makes the names in a directory safe on disk.
///
/// # Errors
/// [`FileError::Io`].
pub fn sync_directory(path: &Path) -> Result<()> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(failed(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f15_what_is_no_file_is_never_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::create_dir(&path).unwrap();
        for refused in [
            open(&path).map(drop),
            read(&path, 9).map(drop),
            create(&path).map(drop),
            change(&path).map(drop),
            replace(&path, b"new"),
            replaceable(&path),
        ] {
            let message = refused.unwrap_err().to_string();
            assert!(message.ends_with("file: is damaged: it is not a regular file"), "{message}");
        }
        assert!(make(&path).unwrap().is_none());
    }

    #[test]
    fn f15_sizes_come_before_contents() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        // A hole, which takes no place on the disk.
        create(&path).unwrap().set_len(1 << 40).unwrap();
        let message = read(&path, 1 << 20).unwrap_err().to_string();
        assert!(message.contains("has 1099511627776 bytes, expected at most 1048576"), "{message}");
        let message = buffer(&path, u64::MAX / 2).unwrap_err().to_string();
        assert!(message.contains("do not fit the memory"), "{message}");
    }

    #[test]
    fn f18_a_file_is_replaced_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        replace(&path, b"old").unwrap();
        let half = |file: &mut File| file.write_all(b"ne").and(Err(io::Error::from(ErrorKind::StorageFull)));
        assert!(replace_with(&path, half).is_err());
        assert_eq!(read(&path, 3).unwrap(), b"old");
        replaceable(&path).unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(read_text(&path, 3).unwrap(), "new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
