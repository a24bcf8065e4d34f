//! `train --trace`: which step, what is printed, and files that cannot be.

use std::fs;

use serde_json::Value;

use super::tiny::{assert_done, assert_refused, contents, digest, dropless, resume, text, train, workplace};

/// The step in a trace, and its events.
fn traced(path: &std::path::Path) -> (u64, Vec<Value>) {
    let trace: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    (trace["otherData"]["step"].as_u64().unwrap(), trace["traceEvents"].as_array().unwrap().clone())
}

#[test]
fn the_third_step_is_traced_or_the_last_one_and_printed() {
    let dir = workplace();
    let plain = dropless(dir.path(), &["train", "tiny.toml", "--steps", "4", "--out", "plain"]);
    let whole = digest(&assert_done(&plain));
    // The trace may lie in the run's own directory, which is not there yet.
    let path = dir.path().join("run/trace.json");
    let printed = assert_done(&train(dir.path(), &["--steps", "4", "--trace", "run/trace.json"]));
    assert_eq!(digest(&printed), whole);
    let (step, events) = traced(&path);
    assert_eq!(step, 3);
    let begin = printed.lines().position(|line| line.starts_with("step 3: ")).unwrap();
    let end = printed.lines().position(|line| line == "trace run/trace.json").unwrap();
    let table: Vec<&str> = printed.lines().take(end).skip(begin).collect();
    assert!(table[0].ends_with(" ms; time of the calls on the host, each of which was waited for"), "{table:?}");
    assert!(table[1].starts_with("queues at work: compute "), "{table:?}");
    assert_eq!(table[2].split_whitespace().collect::<Vec<_>>(), ["op", "calls", "ms", "share", "TFLOP/s", "GB/s"]);
    // Name (of one word or two), calls, ms, share, ...
    let mut calls = 0;
    let mut times = Vec::new();
    for line in &table[3..] {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = words.iter().position(|word| word.parse::<usize>().is_ok()).unwrap();
        calls += words[number].parse::<usize>().unwrap();
        times.push(words[number + 1].parse::<f64>().unwrap());
    }
    assert_eq!(calls, events.iter().filter(|event| event["cat"] == "op").count());
    assert!(times.is_sorted_by(|one, next| one >= next), "{table:?}");

    let printed = assert_done(&resume(dir.path(), &["--steps", "6", "--trace", "later.json"]));
    assert!(printed.lines().any(|line| line == "trace later.json"));
    assert_eq!(traced(&dir.path().join("later.json")).0, 6, "the last one, with two left");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 5, "nothing else is left behind");
}

#[test]
fn a_trace_that_cannot_be_written_is_refused_before_the_first_step() {
    let dir = workplace();
    fs::create_dir(dir.path().join("taken")).unwrap();
    let before = contents(dir.path());
    assert_refused(&train(dir.path(), &["--trace", "absent/trace.json"]), &["absent/trace.json", "No such file"]);
    assert_refused(&train(dir.path(), &["--trace", "taken"]), &["taken", "not a regular file"]);
    assert_eq!(contents(dir.path()), before);
}

#[test]
fn a_run_that_ends_before_the_step_says_so() {
    let dir = workplace();
    let whole = digest(&assert_done(&train(dir.path(), &[])));
    let nothing = resume(dir.path(), &["--trace", "trace.json"]);
    assert_eq!(digest(&assert_done(&nothing)), whole);
    let note = "warning: no trace in trace.json: the run ended before the step of it\n";
    assert_eq!(text(&nothing.stderr), note);
    assert!(!dir.path().join("trace.json").exists());
}
