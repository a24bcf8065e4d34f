//! `PREFIX.bin` and `PREFIX.idx`, which appear only when complete. Until then `PREFIX.partial/` has what is done:
//!
//! ```text
//! bin        ids
//! lengths    u32, ids of each sequence
//! ends       u64, sequences up to the end of each document
//! journal    a line of JSON: hash of the job; then a line for each chunk that is safely in the other files
//! idx        the index, when the rest is complete
//! ```
//!
//! A process that was ended goes on after the last line of the journal; what is in the files beyond it is cut off.

use std::fs::{self, File, TryLockError};
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use dropless_core::files;
use serde::{Deserialize, Serialize};

use super::{Encoded, Extent, Job, with_extension};
use crate::data::indexed;
use crate::error::{Error, Result};

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Documents.
    pub documents: u64,
    /// Tokens.
    pub tokens: u64,
    /// `PREFIX.bin`.
    pub bin: PathBuf,
    /// `PREFIX.idx`.
    pub idx: PathBuf,
}

/// A line of the journal.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Entry {
    Job { job: String },
    Chunk { chunk: usize, extent: Extent },
}

/// The files of `PREFIX.partial/` while they grow.
struct Partial {
    folder: PathBuf,
    bin: File,
    lengths: File,
    ends: File,
    journal: File,
    extent: Extent,
    /// Chunks that are done.
    done: usize,
}

/// The longest journal: that of ten million chunks.
const LONGEST_JOURNAL: u64 = 1 << 30;

const FILES: [&str; 3] = ["bin", "lengths", "ends"];

/// Writes the documents of a job as `PREFIX.bin` and `PREFIX.idx`, or goes on with it. `progress` is told how many bytes
/// of the text are done.
///
/// # Errors
/// [`Error::Usage`] when the files are there already, or what is there of them is of another job; [`Error::Data`] names
/// the file and the line or byte of a text with which something is wrong; [`Error::Io`].
pub fn to_disk(job: &Job<'_>, prefix: &Path, threads: usize, progress: &mut dyn FnMut(u64)) -> Result<Prepared> {
    let [bin, idx, folder] = [".bin", ".idx", ".partial"].map(|extension| with_extension(prefix, extension));
    // A process may be ended between the last steps: the ids get their name, the index gets its own, the folder goes.
    let renamed = bin.exists() && folder.join("journal").exists() && !folder.join("bin").exists();
    if bin.exists() && idx.exists() && !renamed {
        // An empty folder is all that can be left of a process that had finished.
        let _ = fs::remove_dir(&folder);
    }
    for path in [&bin, &idx] {
        if path.exists() && !renamed {
            return Err(Error::Usage(format!("{} is there already: remove it, or name another --out", path.display())));
        }
    }
    let mut partial = Partial::open(&folder, &job.hash().to_hex(), renamed)?;
    if !renamed {
        progress(partial.done.checked_sub(1).map_or(0, |last| job.bytes_until(last)));
        let first = partial.done;
        job.run(first, threads, &mut |at, chunk| {
            partial.add(at, &chunk)?;
            progress(job.bytes_until(at));
            Ok(())
        })?;
        partial.index(job)?;
        rename(&folder.join("bin"), &bin)?;
    }
    if folder.join("idx").exists() {
        rename(&folder.join("idx"), &idx)?;
    }
    sync_parent(&idx)?;
    let Extent { documents, ids, .. } = partial.extent;
    drop(partial);
    // The journal last: as long as the folder is there, it says what the two files are.
    for name in ["lengths", "ends", "journal"] {
        let path = folder.join(name);
        if path.exists() {
            fs::remove_file(&path).map_err(Error::io(&path))?;
        }
    }
    fs::remove_dir(&folder).map_err(Error::io(&folder))?;
    Ok(Prepared { documents, tokens: ids / job.id_type().size() as u64, bin, idx })
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(Error::io(to))
}

/// Makes the names in the folder of `path` durable.
fn sync_parent(path: &Path) -> Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(files::sync_directory(parent)?)
}

impl Partial {
    /// Opens the folder, which this process holds from then on.
    fn open(folder: &Path, job: &str, renamed: bool) -> Result<Partial> {
        fs::create_dir_all(folder).map_err(Error::io(folder))?;
        let path = folder.join("journal");
        let mut journal = files::change(&path)?;
        if let Err(TryLockError::WouldBlock) = journal.try_lock() {
            return Err(Error::Usage(format!("{}: another process is writing it", folder.display())));
        }
        let text = files::read(&path, LONGEST_JOURNAL)?;
        let (mut kept, mut extent, mut done) = (0, Extent::default(), 0);
        for line in text.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n")) {
            match serde_json::from_slice(line) {
                Ok(Entry::Job { job: found }) if kept == 0 && found == job => {}
                Ok(Entry::Job { .. }) if kept == 0 => {
                    let folder = folder.display();
                    let what =
                        "has what is done of other texts, or with another tokenizer: remove it, or name another --out";
                    return Err(Error::Usage(format!("{folder} {what}")));
                }
                Ok(Entry::Chunk { chunk, extent: after }) if kept > 0 && chunk == done => {
                    (extent, done) = (after, chunk + 1);
                }
                _ => break,
            }
            kept += line.len();
        }
        journal.set_len(kept as u64).map_err(Error::io(&path))?;
        journal.seek(SeekFrom::End(0)).map_err(Error::io(&path))?;
        if kept == 0 {
            write_entry(&mut journal, &path, &Entry::Job { job: job.to_owned() })?;
        }
        let sizes = [extent.ids, 4 * extent.sequences, 8 * extent.documents];
        let resume = |(name, size): (&str, u64)| {
            let path = folder.join(name);
            let mut file = files::change(&path)?;
            let found = file.metadata().map_err(Error::io(&path))?.len();
            if found < size {
                let what = format!("is damaged: it has {found} bytes, but {size} were written; remove its folder");
                return Err(Error::checkpoint(&path, what));
            }
            file.set_len(size).and_then(|()| file.seek(SeekFrom::End(0))).map_err(Error::io(&path))?;
            Ok(file)
        };
        let [bin, lengths, ends] = match renamed {
            // Nothing is written any more.
            true => [files::change(&path)?, files::change(&path)?, files::change(&path)?],
            false => {
                let [bin, lengths, ends] = FILES;
                [resume((bin, sizes[0]))?, resume((lengths, sizes[1]))?, resume((ends, sizes[2]))?]
            }
        };
        Ok(Partial { folder: folder.to_owned(), bin, lengths, ends, journal, extent, done })
    }

    /// Adds a chunk: first what it is, and when that is safely on disk, that it is there.
    fn add(&mut self, at: usize, chunk: &Encoded) -> Result<()> {
        let ends = self.extent.add(chunk);
        let lengths: Vec<u8> = chunk.lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
        let ends: Vec<u8> = ends.iter().flat_map(|end| end.to_le_bytes()).collect();
        let files = [&mut self.bin, &mut self.lengths, &mut self.ends];
        for ((file, bytes), name) in files.into_iter().zip([&chunk.ids, &lengths, &ends]).zip(FILES) {
            file.write_all(bytes).and_then(|()| file.sync_data()).map_err(Error::io(self.folder.join(name)))?;
        }
        let entry = Entry::Chunk { chunk: at, extent: self.extent };
        write_entry(&mut self.journal, &self.folder.join("journal"), &entry)?;
        self.done = at + 1;
        Ok(())
    }

    /// Writes the index of what is there, of which only a block is in memory at any time.
    fn index(&mut self, job: &Job<'_>) -> Result<()> {
        let path = self.folder.join("idx");
        let size = job.id_type().size() as u64;
        let file = files::create(&path)?;
        let write = || -> std::io::Result<()> {
            let mut out = BufWriter::new(file);
            out.write_all(&indexed::header(job.id_type(), self.extent.sequences, self.extent.documents))?;
            self.lengths.rewind()?;
            std::io::copy(&mut self.lengths, &mut out)?;
            self.lengths.rewind()?;
            let mut lengths = BufReader::new(&self.lengths);
            let mut pointer = 0u64;
            for _ in 0..self.extent.sequences {
                let mut length = [0; 4];
                lengths.read_exact(&mut length)?;
                out.write_all(&pointer.to_le_bytes())?;
                pointer += u64::from(u32::from_le_bytes(length)) * size;
            }
            out.write_all(&0u64.to_le_bytes())?;
            self.ends.rewind()?;
            std::io::copy(&mut self.ends, &mut out)?;
            out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
        };
        write().map_err(Error::io(&path))
    }
}

fn write_entry(journal: &mut File, path: &Path, entry: &Entry) -> Result<()> {
    let line = serde_json::to_string(entry).unwrap_or_else(|e| unreachable!("plain data: {e}")) + "\n";
    journal.write_all(line.as_bytes()).and_then(|()| journal.sync_data()).map_err(Error::io(path))
}
