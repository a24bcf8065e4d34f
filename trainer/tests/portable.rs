//! The host, wgpu and the program run where Rust does: calls of one system stand in modules of their own.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// What only some systems have.
const SYSTEM: &[&str] =
    &["std::os::", "rustix", "libc::", "nix::", "windows_sys", "\"/proc", "\"/dev", "\"/sys", "\"/tmp"];

/// Where it may stand, behind `cfg`.
const SYSTEM_FILES: &[&str] =
    &["trainer/src/system/cgroup.rs", "trainer/src/system/linux.rs", "trainer/src/system/unix.rs"];

/// The backends that a build may leave out, each with the one file that names it.
const BACKENDS: &[(&str, &str)] =
    &[("dropless_cuda", "trainer/src/backends/cuda.rs"), ("dropless_wgpu", "trainer/src/backends/wgpu.rs")];

/// The sources of these folders, by their paths in the repository.
fn sources(folders: &[&str]) -> Vec<(String, String)> {
    fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    folders.iter().for_each(|folder| walk(&root.join(folder), &mut files));
    let name = |path: &Path| path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
    files.iter().map(|path| (name(path), fs::read_to_string(path).unwrap())).collect()
}

/// The files whose code has one of these words.
fn with(sources: &[(String, String)], words: &[&str]) -> BTreeSet<String> {
    let code = |line: &str| !line.trim_start().starts_with("//");
    // A word begins where it does not continue another: `unix::` is not `nix::`.
    let begins = |line: &str, at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    let says = |line: &str, word: &str| line.match_indices(word).any(|(at, _)| begins(line, at));
    let has = |text: &str| text.lines().filter(|line| code(line)).any(|line| words.iter().any(|w| says(line, w)));
    sources.iter().filter(|(_, text)| has(text)).map(|(name, _)| name.clone()).collect()
}

#[test]
fn calls_of_one_system_stand_in_modules_of_their_own() {
    let sources = sources(&["core/src", "model/src", "backend-wgpu/src", "trainer/src"]);
    assert!(sources.len() > 100, "{} files", sources.len());
    assert_eq!(with(&sources, SYSTEM), SYSTEM_FILES.iter().map(|&name| name.to_owned()).collect());
    // What of signals there is on every system is a flag that Ctrl-C sets.
    let signals = ["trainer/src/system/portable.rs", "trainer/src/system/unix.rs"].map(str::to_owned);
    assert_eq!(with(&sources, &["signal_hook"]), signals.into());
    let unix_only = ["signal_hook::iterator", "signal_hook::low_level"];
    assert_eq!(with(&sources, &unix_only), ["trainer/src/system/unix.rs".to_owned()].into());
}

/// What opens a file, whatever it may be.
const OPENS: &[&str] = &[
    "File::open(",
    "File::create(",
    "File::options(",
    "OpenOptions::",
    "fs::read(",
    "fs::read_to_string(",
    "fs::copy(",
];

/// The way to open files; files of the system itself; and new ones that nobody but the user may read.
const OPENING_FILES: &[&str] =
    &["backend-cuda/src/comm/mod.rs", "backend-cuda/src/jit.rs", "core/src/files.rs", "trainer/src/system/linux.rs"];

#[test]
fn f15_files_are_opened_in_one_place() {
    let mut sources = sources(&["core/src", "model/src", "backend-wgpu/src", "backend-cuda/src", "trainer/src"]);
    sources.retain(|(name, _)| !name.ends_with("_test.rs") && !name.ends_with("/tests.rs"));
    for (_, text) in &mut sources {
        // Tests come last.
        text.truncate(text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len()));
    }
    assert_eq!(with(&sources, OPENS), OPENING_FILES.iter().map(|&name| name.to_owned()).collect());
}

/// What writes to the standard output or error.
const PRINTS: &[&str] = &[
    "print!(",
    "println!(",
    "eprint!(",
    "eprintln!(",
    "dbg!(",
    "io::stdout()",
    "io::stderr()",
    "stdout()",
    "stderr()",
];

/// Where it may stand: each of these neither panics nor holds the program. The terminal's size is no output.
const PRINTING_FILES: &[&str] =
    &["backend-cuda/src/comm/watchdog.rs", "trainer/src/output.rs", "trainer/src/system/unix.rs"];

#[test]
fn f05_one_module_of_the_program_prints() {
    let sources = sources(&["core/src", "model/src", "backend-cuda/src", "backend-wgpu/src", "trainer/src"]);
    // Files that are compiled into tests only.
    let tests: Vec<String> = sources
        .iter()
        .flat_map(|(_, text)| text.split("#[cfg(test)]\nmod ").skip(1))
        .filter_map(|rest| rest.split_once(';').map(|(name, _)| format!("/{name}.rs")))
        .collect();
    let program: Vec<(String, String)> = sources
        .into_iter()
        .filter(|(name, _)| !tests.iter().any(|test| name.ends_with(test)))
        .map(|(name, text)| (name, text.split("#[cfg(test)]\nmod ").next().unwrap_or_default().to_owned()))
        .collect();
    assert_eq!(with(&program, PRINTS), PRINTING_FILES.iter().map(|&name| name.to_owned()).collect());
}

#[test]
fn a_backend_that_a_build_may_leave_out_is_named_in_one_file() {
    for (backend, file) in BACKENDS {
        assert_eq!(
            with(&sources(&["core/src", "model/src", "trainer/src"]), &[backend]),
            BTreeSet::from([(*file).to_owned()])
        );
    }
}

#[test]
fn cuda_is_a_dependency_on_linux_only() {
    for manifest in ["Cargo.toml", "../tests/Cargo.toml"] {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(manifest)).unwrap();
        let manifest: toml::Table = text.parse().unwrap();
        let portable = manifest["dependencies"].as_table().unwrap();
        assert!(!portable.contains_key("dropless-cuda"));
        let linux = &manifest["target"]["cfg(target_os = \"linux\")"]["dependencies"];
        assert!(linux.get("dropless-cuda").is_some());
    }
}
