//! The directory of a run. One process at a time holds it, and nobody else changes anything there. What it cannot hold is
//! found before the first step, and a start that fails before that leaves it as it was.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use dropless_core::files::{self, FileError};

use crate::checkpoint::{self, FOLDER, STATE};
use crate::config::Config;
use crate::data::Kept;
use crate::error::{Error, Result};
use crate::metrics::METRICS;

/// The file with a run's effective configuration; it is there as soon as the run has begun.
pub const CONFIG: &str = "config.toml";
/// The file that a process which trains a run holds.
pub const LOCK: &str = "lock";
/// The longest configuration, and the longest word of a lock.
const LONGEST: u64 = 1 << 20;

/// Verifies that a run may begin in `out`, which need not exist. What was left by one that was ended before it had recorded
/// a step or saved a checkpoint is no run.
///
/// # Errors
/// [`Error::Usage`] names what of another run is there.
pub fn check_new(out: &Path) -> Result<()> {
    match run_in(out) {
        None => Ok(()),
        Some(name) => {
            let resumable = checkpoint::steps(&out.join(FOLDER)).map_or(true, |steps| !steps.is_empty());
            let what = match resumable {
                true => "add --resume to continue it, or name another directory",
                false => "it has no checkpoint to continue from: remove the directory, or name another one",
            };
            Err(Error::Usage(format!("--out {} holds a run already ({name}): {what}", out.display())))
        }
    }
}

/// What is in `out` of a run that has begun: a checkpoint, a line of a step, or files without the `metrics.jsonl` that a
/// run makes before them.
fn run_in(out: &Path) -> Option<&'static str> {
    // A link that leads nowhere is there, too.
    let there = |name: &str| out.join(name).symlink_metadata().is_ok();
    let empty = || fs::metadata(out.join(METRICS)).is_ok_and(|metadata| metadata.is_file() && metadata.len() == 0);
    if !checkpoint::holds_nothing(&out.join(FOLDER)) {
        return Some(FOLDER);
    }
    match there(METRICS) {
        true => (!empty()).then_some(METRICS),
        false => [CONFIG, Kept::FOLDER].into_iter().find(|name| there(name)),
    }
}

/// Verifies that `out` holds a run with a checkpoint.
///
/// # Errors
/// [`Error::Usage`] says what is missing, and [`Error::Checkpoint`] that the folder of the checkpoints leads nowhere.
pub fn check_resumable(out: &Path) -> Result<()> {
    if !checkpoint::steps(&out.join(FOLDER))?.is_empty() {
        return Ok(());
    }
    let runs = fs::read_dir(out).map_err(Error::io(out))?.flatten().map(|entry| entry.path());
    let mut runs: Vec<PathBuf> = runs.filter(|path| path.join(FOLDER).is_dir()).collect();
    runs.sort();
    let what = if out.join(STATE).exists() {
        "is a checkpoint; name the directory of its run".to_owned()
    } else if let Some(run) = runs.first() {
        format!("is no run, but holds some: name one, such as {}", run.display())
    } else if [FOLDER, CONFIG, METRICS].iter().any(|name| out.join(name).exists()) {
        let what = match run_in(out) {
            None => "begin the run without --resume",
            Some(_) => "remove the directory, or begin the run in another one",
        };
        format!("has no checkpoint in {FOLDER}/ to continue from: {what}")
    } else {
        format!("holds no run to continue: it has neither {FOLDER}/ nor {CONFIG}")
    };
    Err(Error::Usage(format!("--resume: {} {what}", out.display())))
}

/// Where a run's configuration is recorded.
#[derive(Debug)]
pub enum Recorded {
    /// In its own file.
    File(PathBuf),
    /// That file was lost, but a checkpoint has it.
    Checkpoint(PathBuf, Box<Config>),
}

impl Recorded {
    /// Where the configuration of the run in `out` is recorded: in its file, unless there is none or nothing is in it.
    ///
    /// # Errors
    /// What else is wrong with the file; [`Error::Checkpoint`] when no checkpoint has the configuration either.
    pub fn find(out: &Path) -> Result<Recorded> {
        let path = out.join(CONFIG);
        match files::read(&path, LONGEST) {
            // A machine that fails may leave zeros in place of what was written.
            Ok(text) if text.iter().all(|byte| byte.is_ascii_whitespace() || *byte == 0) => {}
            Ok(_) => return Ok(Recorded::File(path)),
            Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
        let found = checkpoint::newest_state(out)?;
        let (path, state) = found.ok_or_else(|| {
            Error::checkpoint(path, format!("is lost, and no checkpoint in {FOLDER}/ has the configuration"))
        })?;
        Ok(Recorded::Checkpoint(path, Box::new(state.config)))
    }
}

/// Writes the configuration of the run in `out`.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn write_config(out: &Path, config: &Config) -> Result<()> {
    Ok(files::replace(&out.join(CONFIG), config.to_toml().as_bytes())?)
}

/// A run's directory while this process holds it. The system lets go of it when the process is killed.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    _lock: File,
    /// Whether the lock's file is this process's.
    made: bool,
    /// Whether the run begins.
    new: bool,
}

impl Directory {
    /// Takes the directory, for a run that begins or one that is resumed.
    ///
    /// # Errors
    /// [`Error::Usage`] when another process has it, for a run where none should be, for none where one should be; and
    /// whatever will keep a checkpoint from being written there.
    pub(super) fn claim(out: &Path, resume: bool) -> Result<Directory> {
        checkpoint::text(out)?;
        let check = || if resume { check_resumable(out) } else { check_new(out) };
        check()?;
        let (lock, made) = lock(out)?;
        let directory = Directory { path: out.to_owned(), _lock: lock, made, new: !resume };
        // What was there before may have changed until now, but not from now on.
        match check().and_then(|()| directory.clear()).and_then(|()| directory.probe()) {
            Ok(()) => Ok(directory),
            Err(error) => {
                directory.give_up();
                Err(error)
            }
        }
    }

    /// Removes what was left by a run that never came to its first step.
    fn clear(&self) -> Result<()> {
        if self.new {
            checkpoint::remove_incomplete(&self.path)?;
            Kept::remove(&self.path);
        }
        Ok(())
    }

    /// Makes, renames and removes what has the longest path of all that a checkpoint needs.
    fn probe(&self) -> Result<()> {
        let folder = self.path.join(FOLDER);
        let made = !folder.exists();
        if made {
            fs::create_dir(&folder).map_err(Error::io(&folder))?;
        }
        // A step as long as the last of all, and such that nobody takes it for one that was reached.
        let [from, to] = ["", "old-"].map(|old| folder.join(format!("step-{:020}.tmp-{old}{}", 0, std::process::id())));
        let file = |directory: &Path| directory.join("optimizer-99999-of-99999.safetensors");
        let tried = (|| {
            fs::create_dir(&from).map_err(Error::io(&from))?;
            let mut probe = files::create(&file(&from))?;
            probe.write_all(b"probe").and_then(|()| probe.sync_all()).map_err(Error::io(file(&from)))?;
            fs::rename(&from, &to).map_err(Error::io(&from))?;
            fs::remove_file(file(&to)).map_err(Error::io(file(&to)))?;
            fs::remove_dir(&to).map_err(Error::io(&to))
        })();
        if tried.is_err() {
            // The failure itself is what the caller has to know.
            for directory in [&from, &to] {
                let _ = fs::remove_file(file(directory));
                let _ = fs::remove_dir(directory);
            }
        }
        if made {
            // It comes with the first checkpoint.
            let _ = fs::remove_dir(&folder);
        }
        tried
    }

    /// Whether something is there that a run did.
    fn has_begun(&self) -> bool {
        let lines = fs::metadata(self.path.join(METRICS)).is_ok_and(|metadata| metadata.len() > 0);
        lines || fs::read_dir(self.path.join(FOLDER)).is_ok_and(|mut entries| entries.next().is_some())
    }

    /// Lets go of the directory after a failure. Of a run that had not begun nothing stays.
    pub(super) fn give_up(self) {
        if !self.new || self.has_begun() {
            return;
        }
        // Nothing of a run was there when this process took the directory. What cannot be removed does no harm.
        let _ = fs::remove_dir(self.path.join(FOLDER));
        let _ = fs::remove_file(self.path.join(METRICS));
        let _ = fs::remove_file(self.path.join(CONFIG));
        Kept::remove(&self.path);
        if self.made {
            let _ = fs::remove_file(self.path.join(LOCK));
        }
    }
}

/// Takes the lock of the run in `out`; returns whether its file is new.
fn lock(out: &Path) -> Result<(File, bool)> {
    let path = out.join(LOCK);
    let (mut file, made) = match files::make(&path)? {
        Some(file) => (file, true),
        None => (files::change(&path)?, false),
    };
    let taken = || Error::Usage(format!("{}: another process is training this run", out.display()));
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => return Err(taken()),
        // Some file systems have no locks.
        Ok(()) | Err(TryLockError::Error(_)) => {}
    }
    // Who held it before may have removed its file since it was opened here, and the next process makes another.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let word = format!("{} {since}\n", std::process::id());
    let written = file.set_len(0).and_then(|()| file.write_all(word.as_bytes()));
    let own = written.map_err(Error::io(&path)).map(|()| match files::read(&path, LONGEST) {
        Ok(found) => found == word.as_bytes(),
        Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => false,
        // Some systems let nobody read what is locked.
        Err(_) => true,
    });
    match own {
        Ok(true) => Ok((file, made)),
        Ok(false) => Err(taken()),
        Err(error) => {
            if made {
                let _ = fs::remove_file(&path);
            }
            Err(error)
        }
    }
}
