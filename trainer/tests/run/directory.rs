//! Who may begin or go on in a directory, and what is left there.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::tiny::{
    assert_done, assert_refused, contents, digest, dropless, finish, program, resume, text, train, workplace,
};

/// A first run that has taken the directory and begun nothing yet is this test, which holds the lock.
#[test]
fn f01_a_refused_start_leaves_the_first_run_alone() {
    let dir = workplace();
    let run = dir.path().join("run");
    fs::create_dir(&run).unwrap();
    let lock = File::create(run.join("lock")).unwrap();
    lock.try_lock().unwrap();
    // The third start must not get what the second one would have left.
    for _ in 0..2 {
        assert_refused(&train(dir.path(), &[]), &["run: another process is training this run"]);
        let there: Vec<_> = contents(&run).into_iter().map(|(path, _)| path).collect();
        assert_eq!(there, [run.join("lock")]);
    }
    drop(lock);
    assert_done(&train(dir.path(), &[]));
}

#[test]
fn f01_a_failed_start_removes_what_it_made_and_nothing_else() {
    let dir = workplace();
    let absent = ["--set", "data.train=[\"absent.txt\"]"];
    let fails = |out: &str| {
        let arguments = [&["train", "tiny.toml", "--out", out][..], &absent[..]].concat();
        assert_refused(&dropless(dir.path(), &arguments), &["absent.txt"]);
    };
    let before = contents(dir.path());
    fails("a/b/c");
    fails("run");
    assert_refused(&dropless(dir.path(), &[&["train", "tiny.toml"][..], &absent].concat()), &["absent.txt"]);
    assert_eq!(contents(dir.path()), before);
    // A user's directories, empty or not.
    fs::create_dir_all(dir.path().join("run")).unwrap();
    fs::create_dir_all(dir.path().join("a/mine")).unwrap();
    fs::write(dir.path().join("a/notes.txt"), "mine").unwrap();
    let before = contents(dir.path());
    fails("run");
    fails("a");
    fails("a/b/c");
    assert_eq!(contents(dir.path()), before);
    // Nor does a failure after the configuration was written leave half a run.
    let set = ["--set", "train.learning_rate=1e38", "--set", "train.warmup_steps=0"];
    let failed = train(dir.path(), &[&set[..], &["--init", "absent"]].concat());
    assert_refused(&failed, &["absent"]);
    assert_eq!(contents(dir.path()), before);
}

#[test]
fn f01_what_others_made_among_the_checkpoints_stays() {
    let dir = workplace();
    assert_done(&train(dir.path(), &["--steps", "2"]));
    let folder = dir.path().join("run/checkpoints");
    fs::create_dir(folder.join("step-000006.tmp-mine")).unwrap();
    for left in ["step-000003.tmp-17", "step-000004.tmp-old-18"] {
        fs::create_dir(folder.join(left)).unwrap();
        fs::write(folder.join(left).join("model.safetensors"), "half").unwrap();
    }
    fs::write(folder.join("step-000004.tmp-old-18/notes.txt"), "mine").unwrap();
    let resumed = resume(dir.path(), &["--steps", "3"]);
    assert_done(&resumed);
    let there = |name: &str| folder.join(name).exists();
    assert!(there("step-000006.tmp-mine") && there("step-000004.tmp-old-18/notes.txt"));
    assert!(!there("step-000003.tmp-17") && !there("step-000004.tmp-old-18/model.safetensors"));
    let notes = text(&resumed.stderr);
    assert!(notes.contains("removed run/checkpoints/step-000003.tmp-17, which"), "{notes}");
    assert!(notes.contains("kept run/checkpoints/step-000004.tmp-old-18, which holds files"), "{notes}");
}

#[test]
fn f03_what_is_missing_to_resume_is_said_and_nothing_is_changed() {
    let dir = workplace();
    let whole = digest(&assert_done(&train(dir.path(), &[])));
    fs::create_dir(dir.path().join("empty")).unwrap();
    let before = contents(dir.path());
    let refused = |out: &str, words: &[&str]| {
        let output = dropless(dir.path(), &["train", "tiny.toml", "--resume", "--out", out]);
        assert_refused(&output, words);
    };
    refused("empty", &["--resume: empty holds no run", "neither checkpoints/ nor config.toml"]);
    refused(".", &["--resume: . is no run", "name one, such as ./run"]);
    refused("run/checkpoints/step-000003", &["step-000003 is a checkpoint; name the directory of its run"]);
    assert_eq!(contents(dir.path()), before);

    let (folder, away) = (dir.path().join("run/checkpoints"), dir.path().join("run/away"));
    fs::rename(&folder, &away).unwrap();
    let metrics = fs::read(dir.path().join("run/metrics.jsonl")).unwrap();
    refused("run", &["--resume: run has no checkpoint in checkpoints/"]);
    symlink("nowhere", &folder).unwrap();
    refused("run", &["run/checkpoints: is a link that leads nowhere", "mounted"]);
    assert_eq!(fs::read(dir.path().join("run/metrics.jsonl")).unwrap(), metrics);
    fs::remove_file(&folder).unwrap();
    symlink("away", &folder).unwrap();
    assert_eq!(digest(&assert_done(&resume(dir.path(), &[]))), whole);
}

#[test]
fn f03_nothing_to_do_is_said_and_nothing_is_written() {
    let dir = workplace();
    let whole = digest(&assert_done(&train(dir.path(), &[])));
    let before = contents(&dir.path().join("run"));
    for steps in ["2", "3"] {
        let printed = assert_done(&resume(dir.path(), &["--steps", steps]));
        let line = format!("nothing to do: the run has 3 steps, and train.steps is {steps}");
        assert!(printed.lines().any(|found| found == line), "{printed}");
        assert_eq!(digest(&printed), whole);
    }
    let but_lock = |all: Vec<(std::path::PathBuf, _)>| -> Vec<_> {
        all.into_iter().filter(|(path, _)| !path.ends_with("lock")).collect()
    };
    assert_eq!(but_lock(contents(&dir.path().join("run"))), but_lock(before));
}

#[test]
fn f04_a_name_that_cannot_be_used_is_refused_before_the_first_step() {
    let dir = workplace();
    let before = contents(dir.path());
    let mut latin = program(dir.path(), &["train", "tiny.toml", "--steps", "20", "--out"]);
    latin.arg(OsStr::from_bytes(b"na\xefve"));
    assert_refused(&finish(latin, &["not UTF-8"]), &["must be UTF-8"]);
    // Each part is short enough, and so is the whole until a checkpoint comes into it.
    let long = [&"x".repeat(250)].repeat(16).into_iter().fold(String::new(), |path, part| path + part + "/");
    let output = dropless(dir.path(), &["train", "tiny.toml", "--steps", "20", "--out", &long]);
    assert_refused(&output, &["File name too long"]);
    let part = format!("{}/y", "x".repeat(300));
    assert_refused(&dropless(dir.path(), &["train", "tiny.toml", "--out", &part]), &["File name too long"]);
    assert_eq!(contents(dir.path()), before);
}

#[test]
fn f18_a_lost_configuration_is_made_again_from_the_checkpoint() {
    let dir = workplace();
    let whole = digest(&assert_done(&train(dir.path(), &[])));
    let path = dir.path().join("run/config.toml");
    let config = fs::read_to_string(&path).unwrap();
    type Loss = fn(&Path);
    let losses: [Loss; 3] = [
        |path| fs::remove_file(path).unwrap(),
        |path| fs::write(path, "").unwrap(),
        |path| fs::write(path, [0; 512]).unwrap(),
    ];
    for lose in losses {
        lose(&path);
        fs::remove_dir_all(dir.path().join("run/checkpoints/step-000003")).unwrap();
        let resumed = resume(dir.path(), &[]);
        assert_eq!(digest(&assert_done(&resumed)), whole);
        let note = "run/config.toml was lost, and is made again from run/checkpoints/step-000002\n";
        assert_eq!(text(&resumed.stderr), note);
        assert_eq!(fs::read_to_string(&path).unwrap(), config);
    }
    // What is there and means something else is no loss.
    fs::write(&path, "[train\n").unwrap();
    assert_refused(&resume(dir.path(), &[]), &["run/config.toml:1"]);
}

#[test]
fn f18_foreign_lines_of_the_metrics_stay() {
    let dir = workplace();
    assert_done(&train(dir.path(), &["--steps", "2"]));
    let path = dir.path().join("run/metrics.jsonl");
    let mut lines = fs::read(&path).unwrap();
    let foreign = lines.iter().filter(|&&byte| byte == b'\n').count() + 1;
    lines.extend(b"\xff\xfe of somebody else\n");
    fs::write(&path, &lines).unwrap();
    let resumed = resume(dir.path(), &["--steps", "3"]);
    assert_done(&resumed);
    let note = format!("run/metrics.jsonl: kept 1 line not of a step, the first of them line {foreign}\n");
    assert_eq!(text(&resumed.stderr), note);
    let after = fs::read(&path).unwrap();
    assert!(after.starts_with(&lines) && after[lines.len()..].starts_with(b"{\"step\":3,"));
}
