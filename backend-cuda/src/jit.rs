//! Compilation at run time, with flags that keep the arithmetic of NUMERICS.md, and a cache on disk.

use std::ffi::CString;
use std::fs::{File, Metadata};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use cudarc::nvrtc::{result, sys};
use dropless_core::{Error, Result, files};

use crate::BACKEND;
use crate::symbols::NVRTC;

/// The arithmetic of NUMERICS.md, "Scalars": no contraction, subnormals, correct rounding. Nothing else is accepted.
const ARITHMETIC: [&str; 4] = ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];
/// Warnings are errors in all but name: none is expected. 177: a kernel need not use all of a shared header.
const LANGUAGE: [&str; 3] = ["--std=c++17", "--ptxas-options=-v", "--diag-suppress=177"];

/// A compiler for one architecture.
#[derive(Debug)]
pub(crate) struct Jit {
    architecture: &'static str,
    version: (i32, i32),
    /// None: nothing is kept.
    cache: Option<PathBuf>,
}

/// What the compiler made of a source.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) cubin: Vec<u8>,
    /// Warnings, and the report of registers and spills.
    #[cfg_attr(not(test), expect(dead_code, reason = "the tests read it"))]
    pub(crate) log: String,
}

/// The directory of compiled kernels: `DROPLESS_CACHE`, else the user's cache directory.
fn cache_directory() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("DROPLESS_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("dropless")))
        .or_else(|| Some(variable("HOME")?.join(".cache/dropless")))
}

/// The directory where compiled kernels are kept.
///
/// # Errors
/// Why they are not: every process then compiles its kernels anew.
pub fn kept_kernels() -> std::result::Result<PathBuf, String> {
    let directory = cache_directory().ok_or("none of DROPLESS_CACHE, XDG_CACHE_HOME and HOME is set")?;
    match writable(&directory).and_then(|()| own(&directory)) {
        Ok(()) => Ok(directory),
        Err(error) => Err(format!("{}: {error} (DROPLESS_CACHE names another directory)", directory.display())),
    }
}

impl Jit {
    /// # Errors
    /// [`Error::Unavailable`] when the compiler's library is not there.
    pub(crate) fn new(architecture: &'static str) -> Result<Jit> {
        Jit::with_cache(architecture, cache_directory())
    }

    pub(crate) fn with_cache(architecture: &'static str, cache: Option<PathBuf>) -> Result<Jit> {
        // SAFETY: only looks whether the library can be loaded.
        if !unsafe { sys::is_culib_present() } {
            let why = "no NVRTC (libnvrtc, a part of the CUDA toolkit) on this machine".into();
            return Err(Error::Unavailable { backend: BACKEND, why });
        }
        // SAFETY: only looks whether there is a symbol of this name.
        let has = |name: &str| unsafe { sys::culib().get::<*const ()>(name.as_bytes()) }.is_ok();
        if let Some(symbol) = NVRTC.missing(has) {
            let why = format!("NVRTC is older than that of CUDA 13: it has no {symbol}");
            return Err(Error::Unavailable { backend: BACKEND, why });
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two numbers.
        let known = unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result();
        known.map_err(|e| Error::Unavailable { backend: BACKEND, why: format!("NVRTC does not start: {e}") })?;
        Ok(Jit { architecture, version: (major, minor), cache })
    }

    fn flags(&self) -> Vec<String> {
        let architecture = format!("--gpu-architecture={}", self.architecture);
        std::iter::once(architecture).chain(ARITHMETIC.into_iter().chain(LANGUAGE).map(Into::into)).collect()
    }

    /// The machine code of a source, from the cache if it is there and whole.
    pub(crate) fn cubin(&self, name: &'static str, source: &str) -> Result<Vec<u8>> {
        let Some(directory) = &self.cache else { return Ok(self.compile(name, source)?.cubin) };
        let (major, minor) = self.version;
        let what = format!("NVRTC {major}.{minor} {:?}\n{source}", self.flags());
        let what = blake3::hash(what.as_bytes());
        let path = directory.join(format!("{name}-{}.cubin", what.to_hex()));
        if let Some(cubin) = read(&path, &what) {
            return Ok(cubin);
        }
        let cubin = self.compile(name, source)?.cubin;
        // A cache that cannot be written, or that others may write, costs time at the next start and nothing else.
        let _ = write(&path, &what, &cubin);
        Ok(cubin)
    }

    pub(crate) fn compile(&self, name: &'static str, source: &str) -> Result<Compiled> {
        let failed = |what: String| Error::Device { backend: BACKEND, op: name, what };
        let broken = |e: result::NvrtcError| failed(format!("NVRTC: {e}"));
        let text = CString::new(source).expect("a source has no zero");
        let label = CString::new(format!("{name}.cu")).expect("a name has no zero");
        let program = Program(result::create_program(&text, Some(&label)).map_err(broken)?);
        // SAFETY: the program lives.
        let compiled = unsafe { result::compile_program(program.0, &self.flags()) };
        // SAFETY: the program lives.
        let log = unsafe { result::get_program_log(program.0) }.map_err(broken)?;
        let log: Vec<u8> = log.into_iter().map(i8::cast_unsigned).take_while(|&byte| byte != 0).collect();
        let log = String::from_utf8_lossy(&log).into_owned();
        compiled.map_err(|e| failed(format!("NVRTC: {e}: {}", log.trim())))?;
        let mut size = 0;
        // SAFETY: the program lives; the second call writes `size` bytes.
        let cubin = unsafe {
            sys::nvrtcGetCUBINSize(program.0, &mut size).result().map_err(broken)?;
            let mut cubin = vec![0u8; size];
            sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()).result().map_err(broken)?;
            cubin
        };
        Ok(Compiled { cubin, log })
    }
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created once.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// What a driver loads must be what the compiler made. Nobody but this user, or who may do anything here, can write a
/// file of the cache, since it and its directory are this user's and no one else's to write; a digest with what the code is
/// of finds accidents: a file that is damaged, or another one's.
fn digest(what: &blake3::Hash, cubin: &[u8]) -> blake3::Hash {
    blake3::keyed_hash(what.as_bytes(), cubin)
}

/// The largest file of the cache that makes any sense.
const LARGEST: u64 = 1 << 28;

/// A file of the cache is the digest of the machine code, and the machine code.
fn read(path: &Path, what: &blake3::Hash) -> Option<Vec<u8>> {
    own(path.parent()?).ok()?;
    let (mut file, size) = files::open(path).ok()?;
    owned(&file.metadata().ok()?).ok()?;
    let mut bytes = files::buffer(path, Some(size).filter(|&size| size <= LARGEST)?).ok()?;
    file.read_exact(&mut bytes).ok()?;
    let (found, cubin) = bytes.split_at_checked(blake3::OUT_LEN)?;
    (digest(what, cubin).as_bytes() == found).then(|| cubin.to_vec())
}

/// Another process may read or write the same file: it appears whole or not at all.
fn write(path: &Path, what: &blake3::Hash, cubin: &[u8]) -> std::io::Result<()> {
    let directory = path.parent().expect("a file in a directory");
    create(directory)?;
    own(directory)?;
    let name = path.file_name().expect("a file").to_string_lossy();
    let part = directory.join(format!("{name}.{}", std::process::id()));
    let bytes = [digest(what, cubin).as_bytes(), cubin].concat();
    let made = File::options().write(true).create(true).truncate(true).mode(0o600).open(&part);
    let written = made.and_then(|mut file| file.write_all(&bytes));
    written.and_then(|()| std::fs::rename(&part, path)).inspect_err(|_| {
        // A full disk need not keep the half of it.
        let _ = std::fs::remove_file(&part);
    })
}

/// Makes a directory that only this user may use.
fn create(directory: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Fails unless a directory belongs to this user, and nobody else may write there.
fn own(directory: &Path) -> std::io::Result<()> {
    owned(&std::fs::metadata(directory)?)
}

fn owned(file: &Metadata) -> std::io::Result<()> {
    let user = rustix::process::geteuid().as_raw();
    let refused = |what: String| Err(std::io::Error::new(std::io::ErrorKind::PermissionDenied, what));
    if file.uid() != user {
        return refused(format!("belongs to user {}, and this is user {user}", file.uid()));
    }
    if file.mode() & 0o022 != 0 {
        return refused(format!("others may write there (mode {:o})", file.mode() & 0o7777));
    }
    Ok(())
}

/// Whether files can be made in a directory, which is made if it is not there.
fn writable(directory: &Path) -> std::io::Result<()> {
    create(directory)?;
    let probe = directory.join(format!("probe.{}", std::process::id()));
    std::fs::write(&probe, [])?;
    std::fs::remove_file(probe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::for_each_architecture;

    const SOURCE: &str = "extern \"C\" __global__ void one(float* x) { *x = 1.0f; }";

    #[test]
    fn a_damaged_file_of_the_cache_is_made_again() {
        for_each_architecture(|architecture| {
            let directory = tempfile::tempdir().unwrap();
            let jit = Jit::with_cache(architecture, Some(directory.path().into())).unwrap();
            let cubin = jit.cubin("one", SOURCE).unwrap();
            let files: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|file| file.unwrap().path()).collect();
            assert_eq!(files.len(), 1);
            let whole = std::fs::read(&files[0]).unwrap();
            for garbage in [&b""[..], b"garbage", &whole[..whole.len() - 1]] {
                std::fs::write(&files[0], garbage).unwrap();
                assert_eq!(jit.cubin("one", SOURCE).unwrap(), cubin);
                assert_eq!(std::fs::read(&files[0]).unwrap(), whole);
            }
        });
    }

    #[test]
    fn a_cache_that_cannot_be_written_costs_nothing_but_time() {
        for_each_architecture(|architecture| {
            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join("file");
            std::fs::write(&file, "mine").unwrap();
            let jit = Jit::with_cache(architecture, Some(file.clone())).unwrap();
            assert!(!jit.cubin("one", SOURCE).unwrap().is_empty());
            assert_eq!(std::fs::read(&file).unwrap(), b"mine");
        });
    }

    #[test]
    fn where_no_file_can_be_made_is_known() {
        let directory = tempfile::tempdir().unwrap();
        let (deep, file) = (directory.path().join("a/b"), directory.path().join("file"));
        writable(&deep).unwrap();
        assert_eq!(std::fs::read_dir(&deep).unwrap().count(), 0, "nothing is left behind");
        std::fs::write(&file, "mine").unwrap();
        writable(&file).unwrap_err();
        writable(&file.join("below")).unwrap_err();
    }

    #[test]
    fn what_cannot_be_kept_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        // A directory is where the file should go.
        let path = directory.path().join("one.cubin");
        std::fs::create_dir(&path).unwrap();
        write(&path, &blake3::hash(b"what"), b"cubin").unwrap_err();
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1);
    }

    #[test]
    fn f30_machine_code_that_others_can_write_is_not_loaded() {
        use std::fs::{Permissions, set_permissions};
        use std::os::unix::fs::PermissionsExt;

        let directory = tempfile::tempdir().unwrap();
        let cache = directory.path().join("cache");
        let (path, what) = (cache.join("one.cubin"), blake3::hash(b"what"));
        let allow = |path: &Path, mode| set_permissions(path, Permissions::from_mode(mode)).unwrap();
        write(&path, &what, b"cubin").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&cache), mode(&path)), (0o700, 0o600));
        assert_eq!(read(&path, &what).as_deref(), Some(&b"cubin"[..]));
        // A whole file, but of another kernel.
        assert_eq!(read(&path, &blake3::hash(b"else")), None);
        // Whoever can write a file can write its digest.
        for (place, mode, usual) in
            [(&path, 0o620, 0o600), (&path, 0o602, 0o600), (&cache, 0o770, 0o700), (&cache, 0o707, 0o700)]
        {
            allow(place, mode);
            assert_eq!(read(&path, &what), None, "{mode:o}");
            allow(place, usual);
            assert!(read(&path, &what).is_some());
        }
        allow(&cache, 0o777);
        let error = write(&cache.join("two.cubin"), &what, b"cubin").unwrap_err().to_string();
        assert!(error.contains("others may write there (mode 777)"), "{error}");
        assert!(!cache.join("two.cubin").exists());
    }

    #[test]
    fn a_kernel_that_does_not_compile_says_where() {
        for_each_architecture(|architecture| {
            let jit = Jit::with_cache(architecture, None).unwrap();
            let error = jit.compile("one", "extern \"C\" __global__ void one() { nothing(); }").unwrap_err();
            assert!(error.to_string().contains("one.cu(1): error"), "{error}");
        });
    }
}
