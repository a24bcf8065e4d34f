//! Lists the files of the embedded corpus: this repository's own text.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

const DOCUMENTS: [&str; 3] = ["README.md", "NUMERICS.md", "CHANGELOG.md"];
const SOURCES: [&str; 2] = ["core/src", "trainer/src"];

fn main() -> io::Result<()> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").map_err(io::Error::other)?).join("..").canonicalize()?;
    let mut files: Vec<PathBuf> = DOCUMENTS.iter().map(|name| root.join(name)).filter(|path| path.exists()).collect();
    for folder in SOURCES {
        walk(&root.join(folder), &mut files)?;
    }
    files.sort();
    let mut list = String::from("[\n");
    for path in &files {
        println!("cargo::rerun-if-changed={}", path.display());
        let name = path.strip_prefix(&root).map_err(io::Error::other)?.display().to_string().replace('\\', "/");
        writeln!(list, "    ({name:?}, include_str!({:?})),", path.display().to_string()).map_err(io::Error::other)?;
    }
    list.push_str("]\n");
    let out = PathBuf::from(env::var("OUT_DIR").map_err(io::Error::other)?);
    fs::write(out.join("corpus.rs"), list)
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    println!("cargo::rerun-if-changed={}", folder.display());
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            walk(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
