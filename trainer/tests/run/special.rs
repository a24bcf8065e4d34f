//! Pipes, devices, directories and holes of a terabyte in the place of every file that the program reads.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use super::tiny::{assert_done, dropless, resume, text, train, workplace};

/// Puts something in a free place.
type Put = fn(&Path);

/// What is put in a file's place.
const SPECIAL: [(&str, Put); 4] = [
    ("a pipe", |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success())),
    ("a device", |path| symlink("/dev/zero", path).unwrap()),
    ("a directory", |path| fs::create_dir(path).unwrap()),
    ("a hole", |path| File::create(path).unwrap().set_len(1 << 40).unwrap()),
];

/// Puts each of them in the place of `path` while `run` runs.
fn each(path: &Path, mut run: impl FnMut(&str)) {
    let aside = path.with_extension("aside");
    let there = path.exists();
    if there {
        fs::rename(path, &aside).unwrap();
    }
    for (what, put) in SPECIAL {
        put(path);
        run(&format!("{what} in place of {}", path.display()));
        let removed = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
        removed.unwrap();
    }
    if there {
        fs::rename(aside, path).unwrap();
    }
}

/// Exit code 2 and one line that names the file and says that it is damaged.
fn refused(output: &Output, path: &Path, what: &str) {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{what}: {message}");
    let name = path.file_name().unwrap().to_str().unwrap();
    let said = ["damaged", "not a regular file"].iter().any(|word| message.contains(word));
    assert!(message.lines().count() == 1 && message.contains(name) && said, "{what}: {message}");
}

#[test]
fn f15_in_place_of_a_checkpoints_files() {
    let dir = workplace();
    assert_done(&train(dir.path(), &["--steps", "2"]));
    for name in ["model.safetensors", "optimizer.safetensors", "config.json", "generation_config.json", "state.json"] {
        let path = dir.path().join("run/checkpoints/step-000002").join(name);
        each(&path, |what| {
            // The one before is taken instead; nothing is trained.
            let output = resume(dir.path(), &["--steps", "1"]);
            let notes = text(&output.stderr);
            assert!(assert_done(&output).contains("nothing to do: the run has 1 step"), "{what}");
            assert!(notes.contains(name) && notes.contains("damaged") && notes.lines().count() == 1, "{what}: {notes}");
        });
    }
}

#[test]
fn f15_in_place_of_a_runs_files() {
    let dir = workplace();
    assert_done(&train(dir.path(), &["--steps", "1"]));
    for name in ["lock", "metrics.jsonl", "config.toml"] {
        let path = dir.path().join("run").join(name);
        each(&path, |what| {
            let output = resume(dir.path(), &["--steps", "2"]);
            match (name, what.starts_with("a hole")) {
                // What is in it does not matter.
                ("lock", true) => {
                    assert_done(&output);
                    fs::remove_dir_all(dir.path().join("run/checkpoints/step-000002")).unwrap();
                }
                _ => refused(&output, &path, what),
            }
        });
    }
    let path = dir.path().join("tiny.toml");
    each(&path, |what| refused(&dropless(dir.path(), &["train", "tiny.toml", "--print-config"]), &path, what));
}

#[test]
fn f15_in_place_of_a_model_directorys_files() {
    let reference = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/reference/deepseek_v3_a"));
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "expected.safetensors"] {
        fs::copy(reference.join(name), dir.path().join(name)).unwrap();
    }
    for name in ["config.json", "model.safetensors", "expected.safetensors"] {
        let path = dir.path().join(name);
        each(&path, |what| refused(&dropless(dir.path(), &["verify", "."]), &path, what));
    }
    // Where there is no single file, an index names several.
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let path = dir.path().join("model.safetensors.index.json");
    each(&path, |what| refused(&dropless(dir.path(), &["inspect", "."]), &path, what));
}

/// A tensor of 10 GB that a header really describes, and one of which it only claims so.
#[test]
fn f15_a_sparse_file_takes_no_memory() {
    let reference = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/reference/deepseek_v3_a"));
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(reference.join(name), dir.path().join(name)).unwrap();
    }
    let sparse = |name: &str, header: &str, claimed: u64, data: u64| {
        let bytes = [&claimed.to_le_bytes(), header.as_bytes()].concat();
        fs::write(dir.path().join(name), &bytes).unwrap();
        let file = File::options().write(true).open(dir.path().join(name)).unwrap();
        file.set_len(8 + claimed + data).unwrap();
    };
    let verify = |words: &[&str]| {
        let output = dropless(dir.path(), &["verify", "."]);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.lines().count() == 1 && words.iter().all(|word| message.contains(word)), "{message}");
    };
    let ids = r#"{"input_ids":{"dtype":"I64","shape":[2,640000000],"data_offsets":[0,10240000000]}}"#;
    sparse("expected.safetensors", ids, ids.len() as u64, 10_240_000_000);
    verify(&["expected.safetensors", "[2, 640000000]", "at most"]);
    let logits = concat!(
        r#"{"input_ids":{"dtype":"I64","shape":[1,2],"data_offsets":[0,16]},"#,
        r#""logits.f32":{"dtype":"F32","shape":[2500000000],"data_offsets":[16,10000000016]}}"#
    );
    sparse("expected.safetensors", logits, logits.len() as u64, 10_000_000_016);
    verify(&["expected.safetensors", "do not fit the memory"]);
    sparse("expected.safetensors", "{", 10_000_000_000, 0);
    verify(&["expected.safetensors", "header of 10000000000 bytes, expected at most"]);
    sparse("model.safetensors", "{", 90_000_000, 10_000_000_000);
    verify(&["model.safetensors", "header cannot be read"]);
}

#[test]
fn f15_in_place_of_texts_and_tokenizers() {
    let dir = workplace();
    let out = ["train", "tiny.toml", "--out", "run"];
    let with = |set: &str| dropless(dir.path(), &[&out[..], &["--set", set]].concat());
    let holes = |what: &str| what.starts_with("a hole");
    let tokenizer = dir.path().join("tokenizer.json");
    each(&tokenizer, |what| match what.starts_with("a directory") {
        // It may have the tokenizer in it.
        true => assert!(text(&with("data.tokenizer=\"tokenizer.json\"").stderr).contains("no such tokenizer")),
        false => refused(&with("data.tokenizer=\"tokenizer.json\""), &tokenizer, what),
    });
    fs::write(&tokenizer, "{}").unwrap();
    for name in ["tokenizer_config.json", "generation_config.json"] {
        let path = dir.path().join(name);
        each(&path, |what| refused(&with("data.tokenizer=\"tokenizer.json\""), &path, what));
    }
    let bin = dir.path().join("ids.bin");
    fs::write(dir.path().join("ids.idx"), "no index").unwrap();
    each(&bin, |what| {
        // A corpus may have any length; what it is must be right.
        if !holes(what) {
            refused(&with("data.train=[\"ids.idx\"]"), &bin, what);
        }
    });
    fs::write(&bin, "ids").unwrap();
    let idx = dir.path().join("ids.idx");
    each(&idx, |what| {
        if !holes(what) {
            refused(&with("data.train=[\"ids.bin\"]"), &idx, what);
        }
    });
    // A pattern matches files alone.
    let path = dir.path().join("text.txt");
    each(&path, |what| {
        if !holes(what) {
            let output = with("data.train=[\"text.txt\"]");
            assert_eq!(output.status.code(), Some(2), "{what}");
            assert!(text(&output.stderr).contains("matches no file"), "{what}: {}", text(&output.stderr));
        }
    });
    fs::create_dir(dir.path().join("made.partial")).unwrap();
    for name in ["journal", "bin", "lengths", "ends"] {
        let path = dir.path().join("made.partial").join(name);
        each(&path, |what| {
            if !holes(what) {
                let output = dropless(dir.path(), &["tokenize", "--tokenizer", "byte", "--out", "made", "text.txt"]);
                refused(&output, &path, what);
            }
        });
        let _ = fs::remove_file(&path);
    }
}
