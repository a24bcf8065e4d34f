//! The smallest model with every kind of layer, on a small text, and the program that trains it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::{TempDir, tempdir};

const TINY: &str = r#"
[model]
vocab_size = 257
hidden_size = 32
intermediate_size = 32
moe_intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 16
n_routed_experts = 4
n_group = 2
topk_group = 1
max_position_embeddings = 16
[train]
steps = 3
batch_size = 4
micro_batch_size = 4
sequence_length = 16
warmup_steps = 1
checkpoint_interval = 1
keep_checkpoints = 2
sample_tokens = 0
[data]
train = ["text.txt"]
"#;

/// A directory with a configuration, `tiny.toml`, and its text.
pub(crate) fn workplace() -> TempDir {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("tiny.toml"), TINY).unwrap();
    let text: String = (0..60).map(|i| format!("line {i} of a text that repeats itself\n")).collect();
    fs::write(dir.path().join("text.txt"), text).unwrap();
    dir
}

/// The program, with at most 8 GB of address space, so that memory that is asked for without need is refused.
pub(crate) fn program(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v 8000000; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_dropless")]);
    command.args(arguments).current_dir(dir);
    command
}

/// What the program comes to, which it does within a minute.
pub(crate) fn dropless(dir: &Path, arguments: &[&str]) -> Output {
    finish(program(dir, arguments), arguments)
}

pub(crate) fn finish(mut command: Command, arguments: &[&str]) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("{arguments:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Trains the tiny model in `dir/run` with these further arguments.
pub(crate) fn train(dir: &Path, arguments: &[&str]) -> Output {
    dropless(dir, &[&["train", "tiny.toml", "--out", "run"], arguments].concat())
}

/// Goes on with the run in `dir/run`.
pub(crate) fn resume(dir: &Path, arguments: &[&str]) -> Output {
    dropless(dir, &[&["train", "--resume", "--out", "run"], arguments].concat())
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Asserts exit code 2 and one line on the error output that holds all of `words`.
#[track_caller]
pub(crate) fn assert_refused(output: &Output, words: &[&str]) {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(message.lines().count(), 1, "one line: {message:?}");
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
}

#[track_caller]
pub(crate) fn assert_done(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// The word after `digest` in what a run printed.
#[track_caller]
pub(crate) fn digest(stdout: &str) -> String {
    stdout.lines().find_map(|line| line.strip_prefix("digest ")).unwrap().to_owned()
}

/// What is in a directory and below it, by name; None for what is no regular file.
pub(crate) fn contents(dir: &Path) -> Vec<(PathBuf, Option<Vec<u8>>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let metadata = path.symlink_metadata().unwrap();
        all.push((path.clone(), metadata.is_file().then(|| fs::read(&path).unwrap())));
        if metadata.is_dir() {
            all.extend(contents(&path));
        }
    }
    all.sort();
    all
}
