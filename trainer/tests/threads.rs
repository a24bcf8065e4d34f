//! F17: where the system refuses a thread, whichever it is, the program says so in one line and ends with code 2.
//!
//! Stacks of a GiB in an address space of some GiB make that happen after so many threads, also for root, whom a limit of
//! processes does not bind.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::{TempDir, tempdir};

/// A small model, and a text.
fn workplace() -> TempDir {
    let dir = tempdir().unwrap();
    let config = "[model]\nhidden_size = 32\nintermediate_size = 32\nmoe_intermediate_size = 32\nnum_hidden_layers = 2\n\
                  num_attention_heads = 2\nkv_lora_rank = 16\nqk_nope_head_dim = 8\nqk_rope_head_dim = 8\nv_head_dim = 16\n\
                  n_routed_experts = 4\nn_group = 2\ntopk_group = 1\nmax_position_embeddings = 16\n[train]\nsteps = 1\n\
                  batch_size = 4\nmicro_batch_size = 4\nsequence_length = 16\nwarmup_steps = 1\nsample_tokens = 4\n\
                  [data]\ntrain = [\"text.txt\"]\n";
    fs::write(dir.path().join("small.toml"), config).unwrap();
    let text: String = (0..200).map(|i| format!("line {i} of a text that repeats itself\n")).collect();
    fs::write(dir.path().join("text.txt"), text).unwrap();
    dir
}

/// Runs the program where it may have ever more threads, until it is done. What it said each time before.
fn with_ever_more_threads(dir: &Path, arguments: &str) -> Vec<String> {
    let mut refusals = Vec::new();
    // A thread takes a GiB for its stack, and some more: with every half of one, each thread is once the first without.
    for halves in 1..64_u64 {
        let kib = halves << 19;
        let line = format!("ulimit -v {kib} && exec {} {arguments}", env!("CARGO_BIN_EXE_dropless"));
        let mut command = Command::new("sh");
        command.args(["-c", &line]).env("RUST_MIN_STACK", (1 << 30).to_string()).env("RAYON_NUM_THREADS", "2");
        // A run that began is not begun again.
        let _ = fs::remove_dir_all(dir.join("run"));
        let output = command.current_dir(dir).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        match output.status.code() {
            Some(0) => return refusals,
            Some(2) if error.lines().count() == 1 => refusals.push(error),
            code => panic!("{halves} halves of a GiB: {code:?}: {error}"),
        }
    }
    panic!("never done: {refusals:?}");
}

/// Asserts that among the refusals there is one for each of these threads, and none for anything else.
fn assert_all(refusals: &[String], threads: &[&str]) {
    for thread in threads {
        assert!(refusals.iter().any(|line| line.contains(thread)), "no refusal of {thread}: {refusals:?}");
    }
    for line in refusals {
        assert!(line.starts_with("error: ") && threads.iter().any(|thread| line.contains(thread)), "{line}");
    }
}

#[test]
fn f17_a_refused_thread_of_a_run_is_one_line() {
    let dir = workplace();
    let arguments = "train small.toml --backend host --threads 2 --ranks 4 --out run";
    let mut refusals = with_ever_more_threads(dir.path(), arguments);
    // Between two threads there may be too little for the model.
    refusals.retain(|line| !line.starts_with("error: memory: the host needs "));
    let ranks = ["no thread for rank 1: ", "no thread for rank 3: "];
    let others = [
        "no thread for what this program prints: ",
        "no thread for reading and hashing: ",
        "host: no threads: ",
        "no thread for signals: ",
        "no thread for writing a checkpoint: ",
    ];
    assert_all(&refusals, &[&ranks[..], &others, &["no thread for rank 0: ", "no thread for rank 2: "]].concat());
}

#[test]
fn f17_a_refused_thread_of_tokenize_is_one_line() {
    let dir = workplace();
    let refusals = with_ever_more_threads(dir.path(), "tokenize --tokenizer bytes --out tokens text.txt");
    assert!(refusals.iter().any(|line| line.contains("no thread for tokenizing: ")), "{refusals:?}");
    assert!(refusals.iter().all(|line| line.starts_with("error: no thread for ")), "{refusals:?}");
}

#[test]
fn f17_a_refused_thread_of_a_launch_is_one_line() {
    let dir = workplace();
    let refusals = with_ever_more_threads(dir.path(), "launch --nproc 3 --program sleep -- 0.2");
    assert_all(
        &refusals,
        &[
            "no thread for what this program prints: ",
            "no thread for the output of rank 1: ",
            "no thread for the output of rank 2: ",
        ],
    );
}
