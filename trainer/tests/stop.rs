//! Runs that are asked to stop: by signals, where the program hears more than Ctrl-C, and by a time limit.

#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::path::Path;
#[cfg(not(dropless_portable))]
use std::process::Child;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use dropless::options::{BackendKind, TrainOptions};
use dropless::stop::{Reason, Request};
use dropless::{Config, train};
use tempfile::TempDir;

/// A run of the small model. It takes some milliseconds a step.
const RUN: &[&str] = &[
    "train",
    "--backend",
    "host",
    "--threads",
    "1",
    "--set",
    "model.hidden_size=32",
    "--set",
    "model.num_hidden_layers=2",
    "--set",
    "train.batch_size=4",
    "--set",
    "train.micro_batch_size=4",
    "--set",
    "train.sequence_length=16",
    "--set",
    "train.eval_interval=0",
    "--set",
    "train.eval_batches=1",
    "--set",
    "train.checkpoint_interval=0",
    "--set",
    "train.warmup_steps=1",
    "--set",
    "train.sample_tokens=0",
    "--set",
    "data.validation_fraction=0.003",
];

fn command(out: &Path, steps: u64, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dropless"));
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    command.args(RUN).args(["--steps", &steps.to_string(), "--out"]).arg(out).args(more);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Waits until the run has done that many steps.
#[cfg(not(dropless_portable))]
fn reached(out: &Path, steps: usize) {
    let started = Instant::now();
    let done = || fs::read_to_string(out.join("metrics.jsonl")).map_or(0, |text| text.lines().count());
    while done() < steps {
        assert!(started.elapsed() < Duration::from_secs(60), "step {steps} is not reached");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(not(dropless_portable))]
fn signal(process: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &process.id().to_string()]).status().unwrap().success());
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[cfg(not(dropless_portable))]
fn digest(output: &Output) -> String {
    let text = printed(output);
    text.lines().find_map(|line| line.strip_prefix("digest ")).unwrap_or_else(|| panic!("{text}")).to_owned()
}

/// The steps of the checkpoints of a run.
fn checkpoints(out: &Path) -> Vec<u64> {
    let entries = fs::read_dir(out.join("checkpoints")).unwrap();
    let mut steps: Vec<u64> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap().strip_prefix("step-").unwrap().parse().unwrap())
        .collect();
    steps.sort_unstable();
    steps
}

/// After how many steps a run that was stopped says it was; it has saved them.
fn stopped_after(output: &Output, out: &Path, by: &str) -> u64 {
    let text = printed(output);
    assert_eq!(output.status.code(), Some(3), "{text}");
    let said = text.lines().find_map(|line| line.strip_prefix(&format!("stopped by {by} after step "))).unwrap();
    let step = said.split(' ').next().unwrap().parse().unwrap();
    assert_eq!(checkpoints(out).last(), Some(&step), "{text}");
    step
}

#[cfg(not(dropless_portable))]
#[test]
fn f28_a_signal_ends_the_step_and_saves_and_the_run_goes_on_to_the_same_digest() {
    let dir = TempDir::new().unwrap();
    let whole = digest(&command(&dir.path().join("whole"), 60, &[]).output().unwrap());
    for (name, by, ranks) in [("-TERM", "SIGTERM", "1"), ("-INT", "SIGINT", "2"), ("-USR1", "SIGUSR1", "4")] {
        let out = dir.path().join(by);
        let process = command(&out, 60, &["--ranks", ranks]).spawn().unwrap();
        reached(&out, 3);
        signal(&process, name);
        let output = process.wait_with_output().unwrap();
        let step = stopped_after(&output, &out, by);
        assert!((3..60).contains(&step), "{step}");
        assert!(printed(&output).contains(&format!("{by}: the run ends with this step")), "{}", printed(&output));
        // With other ranks, even.
        let resumed = command(&out, 60, &["--resume"]).output().unwrap();
        assert_eq!((resumed.status.code(), digest(&resumed)), (Some(0), whole.clone()));
    }
}

#[cfg(not(dropless_portable))]
#[test]
fn f28_a_second_signal_ends_the_run_at_once() {
    use std::os::unix::process::ExitStatusExt;
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("run");
    // Steps that take long enough for both signals.
    let slow =
        ["--set", "train.batch_size=512", "--set", "train.micro_batch_size=512", "--set", "train.sequence_length=128"];
    let process = command(&out, 1000, &slow).spawn().unwrap();
    reached(&out, 1);
    signal(&process, "-TERM");
    std::thread::sleep(Duration::from_millis(400));
    signal(&process, "-TERM");
    let output = process.wait_with_output().unwrap();
    // The first may have been in time for the end of a step.
    assert!(output.status.signal() == Some(15) || output.status.code() == Some(3), "{}", printed(&output));
}

#[test]
fn f28_a_time_limit_ends_the_step_and_saves() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("run");
    let output = command(&out, 1_000_000, &["--time-limit", "2s"]).output().unwrap();
    let step = stopped_after(&output, &out, "the time limit");
    assert!(step > 0);
    let more = (step + 2).to_string();
    let resumed = command(&out, step + 2, &["--resume"]).output().unwrap();
    assert!(printed(&resumed).contains(&format!("step {more}/{more}")), "{}", printed(&resumed));
    for wrong in ["2", "1x", "0s", "5m2h"] {
        let output = command(&out, 9, &["--time-limit", wrong]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(printed(&output).contains("such as 2h30m"), "{}", printed(&output));
    }
}

#[test]
fn f28_the_processes_of_a_launch_are_told_and_their_code_is_passed_on() {
    let launch = |line: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dropless"));
        command.args(["launch", "--nproc", "2", "--program", "sh", "--", "-c", line]);
        command.output().unwrap().status.code()
    };
    // The one that is stopped does not end the other.
    assert_eq!(launch("if [ $RANK = 0 ]; then exit 3; else sleep 1; exit 3; fi"), Some(3));
    assert_eq!(launch("if [ $RANK = 0 ]; then exit 3; else sleep 1; exit 2; fi"), Some(2));
}

#[cfg(not(dropless_portable))]
#[test]
fn f28_a_second_signal_ends_a_launch_and_its_ranks() {
    let dir = TempDir::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_dropless"));
    // Ranks that hear nothing.
    let line = "trap '' TERM; echo $$ > rank-$RANK.new; mv rank-$RANK.new rank-$RANK; sleep 60";
    command.args(["launch", "--nproc", "2", "--program", "sh", "--", "-c", line]).current_dir(dir.path());
    let process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let ranks = ["rank-0", "rank-1"].map(|name| dir.path().join(name));
    let started = Instant::now();
    while !ranks.iter().all(|path| path.exists()) {
        assert!(started.elapsed() < Duration::from_secs(60), "the ranks do not start");
        std::thread::sleep(Duration::from_millis(2));
    }
    signal(&process, "-TERM");
    std::thread::sleep(Duration::from_millis(400));
    let asked = Instant::now();
    signal(&process, "-TERM");
    let output = process.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 15), "{}", printed(&output));
    assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
    for path in ranks {
        let id = fs::read_to_string(path).unwrap();
        let alive = Command::new("kill").args(["-0", id.trim()]).stderr(Stdio::null()).status().unwrap().success();
        assert!(!alive, "rank {id} runs on");
    }
}

/// The validation after the last step is of the whole set, and takes long here.
#[test]
fn f28_what_comes_during_the_last_validation_leaves_it_out_and_the_run_is_done() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("run");
    let large = ["--set", "data.validation_fraction=0.9", "--time-limit", "1s"];
    for more in [&large[..], &[&large[..], &["--resume"]].concat()] {
        let started = Instant::now();
        let output = command(&out, 2, more).output().unwrap();
        let text = printed(&output);
        assert_eq!(output.status.code(), Some(0), "{text}");
        assert!(
            text.contains("the time limit: all steps are done and saved, the last validation is left out"),
            "{text}"
        );
        assert!(!text.contains("validation loss") && started.elapsed() < Duration::from_secs(30), "{text}");
        assert_eq!(checkpoints(&out), [2]);
    }
}

/// A run that is done has its validation in its checkpoint. One that is resumed there takes it, even if it is to stop.
#[test]
fn f28_a_validation_that_is_recorded_is_not_done_again() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("run");
    let set = |text: &&str| (!text.starts_with("--")).then(|| (*text).to_owned());
    let overrides: Vec<String> = RUN[5..].iter().filter_map(set).chain(["train.steps=2".into()]).collect();
    let config = Config::load(None, &overrides).unwrap();
    fs::create_dir(&out).unwrap();
    let options = TrainOptions { out, threads: 1, backend: BackendKind::Host, ..TrainOptions::default() };
    let done = train::run(&config, &options).unwrap().unwrap();
    assert_eq!((done.stopped, done.unvalidated, done.validation.len()), (None, None, 1));
    let resumed = TrainOptions { resume: true, stop: Request::default(), ..options };
    resumed.stop.ask(Reason::Terminate);
    let again = train::run(&config, &resumed).unwrap().unwrap();
    assert_eq!((again.stopped, again.unvalidated), (None, None));
    assert_eq!(again.validation, done.validation);
}
