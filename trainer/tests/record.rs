//! `record` and `replay` as a user meets them: files, lines and exit codes.
#![cfg(feature = "wgpu")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use dropless_tests::require::Need;
use dropless_wgpu::recording::Recording;
use dropless_wgpu::{Wgpu, WgpuOptions};

/// A model with one layer of each kind.
const TINY: [&str; 12] = [
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.moe_intermediate_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=1",
    "model.n_routed_experts=4",
    "model.n_group=2",
    "train.sequence_length=16",
    "train.batch_size=4",
    "train.micro_batch_size=4",
    "train.sample_tokens=0",
    "data.validation_fraction=0.003",
];

fn dropless(dir: &Path, arguments: &[&str]) -> Output {
    let set = TINY.iter().flat_map(|set| ["--set", set]);
    let set = set.filter(|_| arguments[0] != "replay");
    Command::new(env!("CARGO_BIN_EXE_dropless")).args(arguments).args(set).current_dir(dir).output().unwrap()
}

fn lines(text: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(text).lines().map(str::to_owned).collect()
}

#[test]
fn a_step_is_recorded_and_replayed() {
    if Need::Wgpu.or_skip(Wgpu::new(&WgpuOptions::default())).is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let recorded = dropless(dir.path(), &["record", "--out", "new/step"]);
    let said = lines(&recorded.stdout);
    assert_eq!(recorded.status.code(), Some(0), "{recorded:?}");
    // The state is that of a run with these numbers.
    let trained = dropless(dir.path(), &["train", "--backend", "host", "--steps", "1"]);
    let digest =
        |lines: &[String], of: &str| lines.iter().find_map(|line| Some(line.strip_prefix(of)?.to_owned())).unwrap();
    assert_eq!(digest(&said, "digest of weights and optimizer state "), digest(&lines(&trained.stdout), "digest "));

    let replayed = dropless(dir.path(), &["replay", "new/step"]);
    assert_eq!(replayed.status.code(), Some(0), "{replayed:?}");
    let same = format!("every op wrote what was recorded: digest {}", digest(&said, "digest of the recording "));
    assert_eq!(lines(&replayed.stdout).last(), Some(&same));

    let path = dir.path().join("new/step");
    let mut recording = Recording::read(&path).unwrap();
    recording.contents[0] ^= 1;
    recording.write(&path).unwrap();
    let replayed = dropless(dir.path(), &["replay", "new/step"]);
    assert_eq!(replayed.status.code(), Some(1), "{replayed:?}");
    let named = format!("op 0 of {}, write, differs (in: initial state)", recording.header.ops);
    assert!(lines(&replayed.stdout).contains(&named), "{replayed:?}");

    fs::write(path.join("sums.bin.gz"), "no gzip").unwrap();
    for (arguments, line) in [
        (&["replay", "new/step"][..], "error: new/step/sums.bin.gz: damaged: "),
        (&["replay", "nowhere"], "error: nowhere/recording.json: No such file"),
        (&["record", "--out", "new"], "error: new: holds something else than a recording"),
        (&["record", "--out", "other", "--steps", "0"], "error: --steps is 0, expected 1 or more"),
    ] {
        let refused = dropless(dir.path(), arguments);
        let said = lines(&refused.stderr);
        assert!(refused.status.code() == Some(2) && said.len() == 1 && said[0].starts_with(line), "{refused:?}");
    }
}
