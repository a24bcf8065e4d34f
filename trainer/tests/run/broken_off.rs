//! Runs that are broken off: killed at random, or by a call that fails. What they lose is at most the steps since the last
//! checkpoint, and they end with the digest of a run that nothing disturbs.
//!
//! `DROPLESS_KILLS` says how many kills, and `DROPLESS_FAULTS` how many of the first calls fail, each in a run of its own
//! and with each of two errors; without them there are a few of both.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use dropless::checkpoint::newest;
use dropless_model::init;
use tempfile::TempDir;

use super::tiny::{assert_done, assert_refused, contents, digest, finish, program, text, workplace};

const STEPS: u64 = 12;
const INTERVAL: u64 = 2;
/// Kills and calls without the variables.
const KILLS: u64 = 8;
const FAULTS: [u64; 10] = [1, 4, 9, 13, 25, 44, 67, 91, 134, 180];

const EIO: i32 = 5;
const EACCES: i32 = 13;
const ENOSPC: i32 = 28;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// A run in a directory of its own.
struct Run {
    place: TempDir,
    out: PathBuf,
}

impl Run {
    fn new() -> Run {
        let place = workplace();
        let out = fs::canonicalize(place.path()).unwrap().join("run");
        Run { place, out }
    }

    /// The step of the newest checkpoint. There is one that is undamaged, or none at all.
    fn saved(&self) -> Option<u64> {
        newest(&self.out).unwrap().checkpoint.map(|checkpoint| checkpoint.state.step)
    }

    /// The arguments that begin the run, or go on with it.
    fn arguments(&self) -> Vec<String> {
        let mut arguments =
            vec!["train".to_owned(), "tiny.toml".into(), "--out".into(), self.out.to_str().unwrap().into()];
        arguments.extend(["--steps".into(), STEPS.to_string(), "--threads".into(), "1".into()]);
        arguments.extend(["--set".into(), format!("train.checkpoint_interval={INTERVAL}")]);
        if self.saved().is_some() {
            arguments.push("--resume".into());
        } else {
            // Nothing was saved yet: it begins again.
            let _ = fs::remove_dir_all(&self.out);
        }
        arguments
    }

    fn command(&self) -> std::process::Command {
        let arguments = self.arguments();
        program(self.place.path(), &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn go_on(&self) -> Output {
        finish(self.command(), &["go on"])
    }

    /// The steps that the metrics have, of which a line that was cut off is none.
    fn steps(&self) -> Vec<u64> {
        let lines = fs::read_to_string(self.out.join("metrics.jsonl")).unwrap_or_default();
        let step = |line: &str| {
            let line = serde_json::from_str::<serde_json::Value>(line).ok()?;
            line.get("loss").and(line.get("step"))?.as_u64()
        };
        lines.lines().filter_map(step).collect()
    }

    /// Asserts that no more is lost than the steps since a checkpoint that was due, and the one that was being written.
    fn assert_little_lost(&self, what: &str) {
        let (done, saved) = (self.steps().last().copied().unwrap_or(0), self.saved().unwrap_or(0));
        assert!(
            done <= saved + 2 * INTERVAL,
            "{what}: {done} steps were done, the newest checkpoint is of step {saved}"
        );
    }

    /// Asserts that the run has ended as one that nothing disturbs, and left nothing else behind.
    fn assert_whole(&self, printed: &str, whole: &str, what: &str) {
        assert_eq!(digest(printed), whole, "{what}");
        assert_eq!(self.steps(), (1..=STEPS).collect::<Vec<_>>(), "{what}");
        let left: Vec<_> = contents(&self.out).into_iter().map(|(path, _)| path).collect();
        let temporary = |path: &&PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().contains(".tmp"));
        assert_eq!(left.iter().find(temporary), None, "{what}");
    }
}

#[test]
fn a_run_that_is_killed_at_random_ends_with_the_same_bits() {
    let started = Instant::now();
    let whole = digest(&assert_done(&Run::new().go_on()));
    let time = u64::try_from(started.elapsed().as_micros()).unwrap();
    let kills = variable("DROPLESS_KILLS").unwrap_or(KILLS);
    let (mut run, key) = (Run::new(), init::key(0, "kills"));
    let (mut kill, mut start) = (0, 0);
    while kill < kills {
        let wait = (u64::from(init::block(key, start)[0]) * time) >> 32;
        start += 1;
        let mut child = run.command().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(wait));
        let killed = child.try_wait().unwrap().is_none();
        child.kill().unwrap();
        child.wait().unwrap();
        run.assert_little_lost(&format!("kill {kill}"));
        kill += u64::from(killed);
        if run.saved() == Some(STEPS) || kill == kills {
            let printed = assert_done(&run.go_on());
            run.assert_whole(&printed, &whole, &format!("after kill {kill}"));
            run = Run::new();
        }
    }
}

/// The library that makes calls fail.
fn library(dir: &Path) -> PathBuf {
    let library = dir.join("failing.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/failing.c");
    let mut compiler = std::process::Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", source, "-ldl", "-o"]).arg(&library);
    let output = compiler.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    library
}

impl Run {
    /// Goes on with one call failing; None if there are fewer calls.
    fn fail(&self, library: &Path, at: u64, error: i32, only: Option<&str>) -> Option<Output> {
        let mark = self.place.path().join("mark");
        let mut command = self.command();
        command.env("LD_PRELOAD", library).env("FAIL_BELOW", &self.out).env("FAIL_MARK", &mark);
        command.env("FAIL_AT", at.to_string()).env("FAIL_ERRNO", error.to_string());
        command.envs(only.map(|only| ("FAIL_ONLY", only)));
        let output = finish(command, &["a call fails"]);
        fs::remove_file(mark).ok().map(|()| output)
    }
}

#[test]
fn a_run_in_which_any_call_fails_ends_with_the_same_bits() {
    let tools = tempfile::tempdir().unwrap();
    let library = library(tools.path());
    let whole = digest(&assert_done(&Run::new().go_on()));
    let calls = variable("DROPLESS_FAULTS").map_or(FAULTS.to_vec(), |last| (1..=last).collect());
    for at in calls {
        for error in [EIO, ENOSPC] {
            let (run, what) = (Run::new(), format!("call {at} fails with {error}"));
            let failed =
                run.fail(&library, at, error, None).unwrap_or_else(|| panic!("there are fewer than {at} calls"));
            // What could not be written ends the run with a line, or did not matter.
            let message = text(&failed.stderr);
            match failed.status.code() {
                Some(0) => {}
                Some(2) => assert_eq!(message.lines().count(), 1, "{what}: {message}"),
                code => panic!("{what}: exit code {code:?}, {message}"),
            }
            run.assert_little_lost(&what);
            let printed = assert_done(&run.go_on());
            run.assert_whole(&printed, &whole, &what);
        }
    }
}

#[test]
fn f04_where_nothing_can_be_renamed_nothing_is_trained() {
    let tools = tempfile::tempdir().unwrap();
    let library = library(tools.path());
    let run = Run::new();
    for (at, name) in [(1, "checkpoints/step-"), (2, "config.toml")] {
        let refused = run.fail(&library, at, EACCES, Some("rename")).unwrap();
        assert_refused(&refused, &[name, "Permission denied"]);
        assert!(!run.out.exists(), "nothing stays of a run that never began");
    }
}
