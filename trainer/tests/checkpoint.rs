//! Checkpoints: what is saved is what is read, and damage of any kind loses nothing but the damaged one.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use dropless::Config;
use dropless::checkpoint::{Checkpoint, Save, Saved, State, digest, newest, remove_incomplete, save};
use dropless::data::{Place, Position, TextRecord};
use dropless_core::host::{Host, HostOptions};
use dropless_core::{Backend, Group};
use dropless_model::hf::{NamedTensor, TensorFiles};
use safetensors::Dtype;
use tempfile::{TempDir, tempdir};

fn state(step: u64) -> State {
    let overrides = ["train.seed=18446744073709551".into(), "train.learning_rate=0.1234567890123456".into()];
    let place = Place { epoch: 3, index: 17, taken: 117 };
    let text = TextRecord { train: "a".repeat(64), ..TextRecord::default() };
    let config = Config::load(None, &overrides).unwrap();
    State {
        step,
        position: Position { sources: vec![place] },
        text,
        config,
        validation_loss: None,
        validation: BTreeMap::new(),
    }
}

/// One rank.
fn host() -> Host {
    Host::new(HostOptions { threads: 1, ..HostOptions::default() }).unwrap()
}

/// What each of `ranks` ranks makes of `work`, all at the same time, with `expert_ranks` of them sharing the experts.
fn on_ranks<R: Send>(ranks: usize, expert_ranks: usize, work: impl Fn(&dyn Backend) -> R + Sync) -> Vec<R> {
    let options = HostOptions { threads: 1, expert_ranks: Some(expert_ranks), ..HostOptions::default() };
    let hosts = Host::ranks(ranks, options).unwrap();
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = hosts.into_iter().map(|host| scope.spawn(move || work(&host))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn matrix(name: &str, value: f32) -> NamedTensor {
    NamedTensor::f32(name, &[2, 3], &[value; 6])
}

/// Saves a checkpoint of one rank whose tensors hold `value`, and returns its digest.
fn save_one(out: &Path, step: u64, value: f32, keep: usize) -> dropless::Result<String> {
    let weights = [matrix("lm_head.weight", value)];
    let optimizer = [matrix("exp_avg.lm_head.weight", value), matrix("exp_avg_sq.lm_head.weight", value)];
    let state = state(step);
    let all = Save { out, weights: &weights, optimizer: &optimizer, state: &state, keep };
    Ok(save(&host(), &all)?.unwrap().digest)
}

fn directory(out: &Path, step: u64) -> PathBuf {
    out.join(format!("checkpoints/step-{step:06}"))
}

fn listing(out: &Path) -> Vec<String> {
    let entries = fs::read_dir(out.join("checkpoints")).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn value(checkpoint: &Checkpoint) -> f32 {
    checkpoint.weights.values("lm_head.weight", &[2, 3]).unwrap()[0]
}

/// The newest checkpoint and the notes.
fn find(out: &Path) -> (Checkpoint, Vec<String>) {
    let found = newest(out).unwrap();
    (found.checkpoint.unwrap(), found.notes)
}

#[test]
fn what_is_saved_is_what_is_read() {
    let out = tempdir().unwrap();
    let saved = save_one(out.path(), 20, 1.5, 0).unwrap();
    let (checkpoint, notes) = find(out.path());
    assert_eq!(checkpoint.path, directory(out.path(), 20));
    assert_eq!(checkpoint.state, state(20), "floats and large integers survive");
    assert_eq!(checkpoint.digest, saved);
    assert_eq!(value(&checkpoint), 1.5);
    assert_eq!(
        checkpoint.optimizer.names().collect::<Vec<_>>(),
        ["exp_avg.lm_head.weight", "exp_avg_sq.lm_head.weight"]
    );
    assert!(notes.is_empty());
    let model = dropless::config::ModelConfig::from_hf(&checkpoint.path.join("config.json")).unwrap();
    assert_eq!(model, checkpoint.state.config.model);
}

#[test]
fn an_empty_directory_has_no_checkpoint() {
    let out = tempdir().unwrap();
    assert!(newest(out.path()).unwrap().checkpoint.is_none());
    assert!(newest(&out.path().join("absent")).unwrap().checkpoint.is_none());
}

#[test]
fn the_digest_depends_on_every_tensor_and_not_on_their_order() {
    let hashes = |tensors: &[NamedTensor]| tensors.iter().map(|t| (t.name.clone(), t.hash())).collect::<Vec<_>>();
    let base = [matrix("a", 1.0), matrix("b", 2.0)];
    let of = |tensors: &[NamedTensor]| digest(hashes(tensors));
    assert_eq!(of(&base), of(&[base[1].clone(), base[0].clone()]));
    assert_eq!(of(&base).len(), 32);
    let zero = f32::from_bits(0x8000_0000);
    for other in [
        vec![matrix("a", 1.0)],
        vec![matrix("a", 2.0), matrix("b", 1.0)],
        vec![matrix("a", 1.0), matrix("c", 2.0)],
        vec![NamedTensor { shape: vec![3, 2], ..base[0].clone() }, base[1].clone()],
        vec![NamedTensor { dtype: Dtype::U32, ..base[0].clone() }, base[1].clone()],
    ] {
        assert_ne!(of(&base), of(&other));
    }
    assert_ne!(of(&[matrix("a", 0.0)]), of(&[matrix("a", zero)]));
}

#[test]
fn the_last_n_stay() {
    let out = tempdir().unwrap();
    for step in 1..=4 {
        save_one(out.path(), step, step as f32, 2).unwrap();
    }
    assert_eq!(listing(out.path()), ["step-000003", "step-000004"]);
    save_one(out.path(), 5, 5.0, 0).unwrap();
    assert_eq!(listing(out.path()).len(), 3);
}

/// A run goes on and removes what is old while somebody else looks for its newest checkpoint.
#[test]
fn a_checkpoint_that_goes_while_it_is_read_has_a_newer_one() {
    let out = tempdir().unwrap();
    save_one(out.path(), 1, 1.0, 1).unwrap();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| (2..150).for_each(|step| drop(save_one(out.path(), step, 1.0, 1).unwrap())));
        while !run.is_finished() {
            let (_, notes) = find(out.path());
            assert!(notes.is_empty(), "{notes:?}");
        }
    });
    assert_eq!(listing(out.path()), ["step-000149"]);
}

/// A run that goes on retires checkpoints, also one that another process has just checked.
#[test]
fn f27_a_checkpoint_that_was_found_is_read_after_it_was_removed() {
    let out = tempdir().unwrap();
    save_one(out.path(), 20, 1.5, 1).unwrap();
    let (checkpoint, _) = find(out.path());
    save_one(out.path(), 21, 2.5, 1).unwrap();
    assert_eq!(listing(out.path()), ["step-000021"]);
    assert_eq!(value(&checkpoint), 1.5);
    assert_eq!(checkpoint.optimizer.values("exp_avg.lm_head.weight", &[2, 3]).unwrap(), [1.5; 6]);
    let config = checkpoint.file("config.json").unwrap().unwrap();
    assert_eq!(config, fs::read(directory(out.path(), 21).join("config.json")).unwrap());
    assert_eq!(checkpoint.file("tokenizer.json").unwrap(), None);
}

#[test]
fn f27_the_best_by_validation_loss_stays_beside_the_newest() {
    let out = tempfile::tempdir().unwrap();
    let losses = [
        (1, Some(3.0)),
        (2, Some(2.0)),
        (3, None),
        (4, Some(2.5)),
        (5, Some(2.5)),
        (6, None),
        (7, Some(2.0)),
        (8, None),
    ];
    let mut listed = Vec::new();
    for (step, validation_loss) in losses {
        let state = State { validation_loss, ..state(step) };
        let weights = [matrix("w", 1.0)];
        let one = Save { out: out.path(), weights: &weights, optimizer: &[], state: &state, keep: 1 };
        save(&host(), &one).unwrap();
        listed.push(listing(out.path()));
    }
    let names = |steps: &[u64]| steps.iter().map(|step| format!("step-{step:06}")).collect::<Vec<_>>();
    // Of equally good ones, the latest.
    let expected = [&[1][..], &[2], &[2, 3], &[2, 4], &[2, 5], &[2, 6], &[7], &[7, 8]];
    assert_eq!(listed, expected.map(names));
}

#[test]
fn a_damaged_later_checkpoint_does_not_displace_a_good_one() {
    let out = tempdir().unwrap();
    save_one(out.path(), 1, 1.0, 1).unwrap();
    let damaged = directory(out.path(), 9);
    fs::create_dir(&damaged).unwrap();
    fs::write(damaged.join("state.json"), "{}").unwrap();
    save_one(out.path(), 2, 2.0, 1).unwrap();
    assert_eq!(listing(out.path()), ["step-000002", "step-000009"]);
    assert_eq!(value(&find(out.path()).0), 2.0);
}

#[test]
fn a_step_that_is_saved_again_replaces_the_old_one() {
    let out = tempdir().unwrap();
    save_one(out.path(), 1, 1.0, 0).unwrap();
    save_one(out.path(), 1, 2.0, 0).unwrap();
    assert_eq!(listing(out.path()), ["step-000001"]);
    assert_eq!(value(&find(out.path()).0), 2.0);
}

#[test]
fn b18a_an_interrupted_save_is_ignored_and_removed_with_a_message() {
    let out = tempdir().unwrap();
    save_one(out.path(), 10, 1.0, 1).unwrap();
    // Killed at any point before the rename: some files of the next one are there, under its temporary name.
    let half = out.path().join("checkpoints/step-000020.tmp-4711");
    fs::create_dir(&half).unwrap();
    fs::copy(directory(out.path(), 10).join("model.safetensors"), half.join("model.safetensors")).unwrap();
    // Killed while an older one was being removed.
    fs::create_dir(out.path().join("checkpoints/step-000005.tmp-old-4711")).unwrap();
    // Who only reads leaves it alone: it may be the save of a run that goes on.
    let (checkpoint, notes) = find(out.path());
    assert_eq!((checkpoint.state.step, value(&checkpoint), notes.len()), (10, 1.0, 0));
    assert_eq!(listing(out.path()).len(), 3);
    let notes = remove_incomplete(out.path()).unwrap();
    assert_eq!(notes.len(), 2);
    assert!(notes.iter().any(|note| note.contains("step-000020.tmp-4711")), "{notes:?}");
    assert_eq!(listing(out.path()), ["step-000010"]);
}

/// Every way of damaging a file of the newest checkpoint.
#[test]
fn b18c_damage_is_named_and_the_previous_checkpoint_is_used() {
    type Damage = fn(&mut Vec<u8>);
    let damages: [(&str, Damage); 6] = [
        ("truncated", |b| b.truncate(b.len() - 10)),
        ("appended", |b| b.extend([0; 10])),
        ("empty", Vec::clear),
        ("a flipped bit", |b| {
            let middle = b.len() / 2;
            b[middle] ^= 1;
        }),
        ("the last byte", |b| *b.last_mut().unwrap() ^= 0x80),
        ("a huge header", |b| b[..8].fill(0x7F)),
    ];
    for file in ["model.safetensors", "optimizer.safetensors", "config.json", "generation_config.json", "state.json"] {
        for (what, damage) in damages {
            let out = tempdir().unwrap();
            save_one(out.path(), 1, 1.0, 0).unwrap();
            save_one(out.path(), 2, 2.0, 0).unwrap();
            let path = directory(out.path(), 2).join(file);
            let mut bytes = fs::read(&path).unwrap();
            damage(&mut bytes);
            fs::write(&path, &bytes).unwrap();
            let (checkpoint, notes) = find(out.path());
            assert_eq!((checkpoint.state.step, value(&checkpoint)), (1, 1.0), "{file}: {what}");
            assert_eq!(notes.len(), 1, "{notes:?}");
            assert!(notes[0].contains(file) && notes[0].contains("damaged"), "{what}: {notes:?}");
            fs::remove_file(&path).unwrap();
            assert!(find(out.path()).1[0].contains(file));
            // What is no regular file would hang, or never end.
            fs::create_dir(&path).unwrap();
            assert!(find(out.path()).1[0].contains("not a regular file"));
        }
    }
}

#[test]
fn when_all_checkpoints_are_damaged_the_newest_is_named() {
    let out = tempdir().unwrap();
    save_one(out.path(), 1, 1.0, 0).unwrap();
    let path = directory(out.path(), 1).join("model.safetensors");
    fs::write(&path, b"short").unwrap();
    let message = newest(out.path()).unwrap_err().to_string();
    assert!(message.contains("no checkpoint is undamaged") && message.contains("has 5 bytes"), "{message}");
}

fn safetensors_file(dir: &TempDir, name: &str, header: &str, data: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat();
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn b18c_a_foreign_file_that_is_damaged_is_described_with_its_sizes() {
    let dir = tempdir().unwrap();
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let size = 8 + header.len() + 8;
    let path = safetensors_file(&dir, "model.safetensors", header, &[0; 8]);
    let whole = fs::read(&path).unwrap();
    TensorFiles::open(dir.path(), "model").unwrap();
    let refuse = |bytes: &[u8], words: &[String]| {
        fs::write(&path, bytes).unwrap();
        let message = TensorFiles::open(dir.path(), "model").unwrap_err().to_string();
        for word in words.iter().chain([&"model.safetensors".to_owned()]) {
            assert!(message.contains(word), "{message:?} lacks {word:?}");
        }
    };
    refuse(&whole[..size - 5], &[format!("has {} bytes", size - 5), format!("describes {size}")]);
    refuse(&[&whole[..], &[0; 10]].concat(), &[format!("has {} bytes", size + 10), format!("describes {size}")]);
    refuse(&[], &["has 0 bytes".into()]);
    refuse(&[0xFF; 16], &[u64::MAX.to_string(), "16".into()]);
    refuse(&[&100u64.to_le_bytes()[..], b"{}"].concat(), &["claims 100 bytes".into(), "has 10".into()]);
    refuse(&[&2u64.to_le_bytes()[..], b"{]"].concat(), &["header cannot be read".into()]);
}

#[test]
fn b187_every_element_type_survives_and_an_unknown_one_is_named() {
    let out = tempdir().unwrap();
    let tensor = |name: &str, dtype, shape: &[usize], bytes: &[u8]| NamedTensor {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        bytes: bytes.to_vec(),
    };
    let weights = [
        tensor("e4m3", Dtype::F8_E4M3, &[3], &[0x7F, 0x80, 1]),
        tensor("e5m2", Dtype::F8_E5M2, &[2], &[0x7C, 0xFF]),
        tensor("e8m0", Dtype::F8_E8M0, &[2], &[0, 255]),
        tensor("e2m1", Dtype::F4, &[2, 2], &[0x10, 0xF7]),
        tensor("bf16", Dtype::BF16, &[1], &[0x80, 0x3F]),
        tensor("empty", Dtype::F32, &[0, 4], &[]),
    ];
    let state = state(1);
    let all = Save { out: out.path(), weights: &weights, optimizer: &[], state: &state, keep: 0 };
    save(&host(), &all).unwrap();
    let (checkpoint, _) = find(out.path());
    for tensor in &weights {
        assert_eq!(checkpoint.weights.get(&tensor.name).unwrap(), *tensor);
    }
    assert_eq!(checkpoint.weights.values("bf16", &[1]).unwrap(), [1.0]);
    let message = checkpoint.weights.values("e5m2", &[2]).unwrap_err().to_string();
    assert!(message.contains("e5m2 is F8_E5M2") && message.contains("model.safetensors"), "{message}");

    let dir = tempdir().unwrap();
    let header = r#"{"w":{"dtype":"F7_X","shape":[1],"data_offsets":[0,1]}}"#;
    safetensors_file(&dir, "model.safetensors", header, &[0]);
    let message = TensorFiles::open(dir.path(), "model").unwrap_err().to_string();
    assert!(message.contains("w has the unsupported type \"F7_X\"") && message.contains("model.safetensors"));
}

#[test]
fn b186_data_that_is_not_aligned_is_read_by_copying() {
    let dir = tempdir().unwrap();
    for padding in 0..4 {
        let mut header = String::from(
            r#"{"f":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"BF16","shape":[1],"data_offsets":[4,6]}}"#,
        );
        header.push_str(&" ".repeat(padding));
        let data = [&2.5f32.to_le_bytes()[..], &0x3F80u16.to_le_bytes()].concat();
        safetensors_file(&dir, "model.safetensors", &header, &data);
        let tensors = TensorFiles::open(dir.path(), "model").unwrap();
        assert_eq!(tensors.values("f", &[1]).unwrap(), [2.5]);
        assert_eq!(tensors.values("b", &[1]).unwrap(), [1.0]);
    }
}

#[test]
fn b132_the_layout_comes_from_the_name_even_when_the_matrix_is_square() {
    let out = tempdir().unwrap();
    let mut marked = vec![0.0; 16];
    marked[1] = 1.0;
    let name = "model.layers.1.mlp.experts.0.down_proj.weight";
    let weights = [NamedTensor::f32(name, &[4, 4], &marked)];
    let state = state(1);
    let all = Save { out: out.path(), weights: &weights, optimizer: &[], state: &state, keep: 0 };
    save(&host(), &all).unwrap();
    let (checkpoint, _) = find(out.path());
    assert_eq!(checkpoint.weights.values(name, &[4, 4]).unwrap(), marked);
    let message = checkpoint.weights.values(name, &[2, 8]).unwrap_err().to_string();
    assert!(message.contains("[4, 4]") && message.contains("[2, 8]"), "{message}");
}

#[test]
fn b092_selection_biases_stay_f32() {
    let out = tempdir().unwrap();
    let name = "model.layers.1.mlp.gate.e_score_correction_bias";
    let biases: Vec<f32> = (0..247).map(|i| 6.817 + 0.001 * i as f32).collect();
    let state = state(1);
    let write = |tensor: NamedTensor| {
        let weights = [tensor];
        let all = Save { out: out.path(), weights: &weights, optimizer: &[], state: &state, keep: 0 };
        save(&host(), &all).map(drop)
    };
    write(NamedTensor::f32(name, &[247], &biases)).unwrap();
    let (checkpoint, _) = find(out.path());
    assert_eq!(checkpoint.weights.get(name).unwrap().dtype, Dtype::F32);
    let mut read = checkpoint.weights.values(name, &[247]).unwrap();
    assert_eq!(read, biases);
    read.dedup();
    assert_eq!(read.len(), 247, "still distinct");
    let half = NamedTensor { name: name.into(), dtype: Dtype::BF16, shape: vec![1], bytes: vec![0, 0] };
    assert!(write(half).unwrap_err().to_string().contains("must be F32"));
}

const EXPERTS: usize = 4;

fn expert(g: usize) -> String {
    format!("model.layers.1.mlp.experts.{g}.gate_proj.weight")
}

/// Saves with `ranks` ranks, each of the first `expert_ranks` its own experts filled with g + 1 (rank 0 also the head).
fn save_ranks(out: &Path, ranks: usize, expert_ranks: usize) -> Vec<dropless::Result<Option<Saved>>> {
    on_ranks(ranks, expert_ranks, |backend| {
        let own = if backend.caps().place(Group::Replicas) == 0 { EXPERTS / expert_ranks } else { 0 };
        let rank = backend.caps().rank;
        let mut weights: Vec<NamedTensor> =
            (rank * own..(rank + 1) * own).map(|g| matrix(&expert(g), g as f32 + 1.0)).collect();
        let moments =
            |name| weights.iter().map(move |t| NamedTensor { name: format!("{name}.{}", t.name), ..t.clone() });
        let optimizer: Vec<NamedTensor> = moments("exp_avg").chain(moments("exp_avg_sq")).collect();
        if rank == 0 {
            weights.push(matrix("lm_head.weight", 9.0));
        }
        let state = state(1);
        let (weights, optimizer) = (&weights[..], &optimizer[..]);
        save(backend, &Save { out, weights, optimizer, state: &state, keep: 0 })
    })
}

#[test]
fn b180_experts_are_saved_once_under_their_global_names_whatever_the_ranks() {
    let mut digests = Vec::new();
    for (ranks, expert_ranks) in [(1, 1), (2, 2), (4, 4), (4, 2), (2, 1)] {
        let out = tempdir().unwrap();
        let saved: Vec<_> = save_ranks(out.path(), ranks, expert_ranks).into_iter().map(Result::unwrap).collect();
        assert!(saved[0].is_some() && saved[1..].iter().all(Option::is_none));
        let (checkpoint, _) = find(out.path());
        let mut files: Vec<String> = (1..=expert_ranks)
            .map(|part| format!("model-{part:05}-of-{expert_ranks:05}.safetensors"))
            .chain([String::from("model.safetensors.index.json")])
            .collect();
        if expert_ranks == 1 {
            files = vec!["model.safetensors".into()];
        }
        let entries = fs::read_dir(&checkpoint.path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut found: Vec<String> = entries.filter(|name| name.starts_with("model")).collect();
        found.sort();
        assert_eq!(found, files, "{ranks} ranks, {expert_ranks} of them share experts");
        let experts: Vec<&str> = checkpoint.weights.names().filter(|name| name.contains("experts")).collect();
        assert_eq!(experts, (0..EXPERTS).map(expert).collect::<Vec<_>>());
        for g in 0..EXPERTS {
            let expected = [g as f32 + 1.0; 6];
            assert_eq!(checkpoint.weights.values(&expert(g), &[2, 3]).unwrap(), expected);
            for moment in ["exp_avg", "exp_avg_sq"] {
                let name = format!("{moment}.{}", expert(g));
                assert_eq!(checkpoint.optimizer.values(&name, &[2, 3]).unwrap(), expected);
            }
        }
        let message = checkpoint.weights.values(&expert(EXPERTS), &[2, 3]).unwrap_err().to_string();
        assert!(message.contains(&expert(EXPERTS)), "{message}");
        digests.push(checkpoint.digest);
    }
    assert!(digests.iter().all(|d| *d == digests[0]), "{digests:?}");
}

#[test]
fn b180_a_tensor_that_two_ranks_save_is_an_error_for_both() {
    let (out, state) = (tempdir().unwrap(), state(1));
    let weights = [matrix("lm_head.weight", 1.0)];
    let all = Save { out: out.path(), weights: &weights, optimizer: &[], state: &state, keep: 0 };
    let errors = on_ranks(2, 2, |backend| save(backend, &all).unwrap_err().to_string());
    assert!(errors[0].contains("lm_head.weight is in both"), "{errors:?}");
    assert_eq!(errors[1], "rank 1: checkpoint: rank 0 failed");
    assert!(listing(out.path()).is_empty());
}

#[test]
fn a_rank_that_cannot_write_its_part_leaves_no_checkpoint() {
    let (out, state) = (tempdir().unwrap(), state(1));
    let bias = "model.layers.1.mlp.gate.e_score_correction_bias";
    let errors = on_ranks(2, 2, |backend| {
        let bad = NamedTensor { name: bias.into(), dtype: Dtype::BF16, shape: vec![1], bytes: vec![0, 0] };
        let weights = [[matrix("lm_head.weight", 1.0)], [bad]];
        let weights = &weights[backend.caps().rank];
        save(backend, &Save { out: out.path(), weights, optimizer: &[], state: &state, keep: 0 })
            .unwrap_err()
            .to_string()
    });
    assert_eq!(errors[0], "rank 0: checkpoint: rank 1 failed");
    assert!(errors[1].contains("must be F32"), "{errors:?}");
    assert!(listing(out.path()).is_empty());
}

#[test]
fn a_rank_that_is_gone_is_not_waited_for() {
    let (out, state) = (tempdir().unwrap(), state(1));
    let all = Save { out: out.path(), weights: &[], optimizer: &[], state: &state, keep: 0 };
    let errors = on_ranks(2, 2, |backend| {
        // Rank 1 goes away without a word; nor is it waited for later.
        let save = || save(backend, &all).unwrap_err().to_string();
        (backend.caps().rank == 0).then(|| [save(), save()])
    });
    assert_eq!(errors, [Some([const { "rank 0: all_to_all: rank 1 left" }; 2].map(str::to_owned)), None]);
    assert!(!out.path().join("checkpoints").exists());
}

const FULL_DISK: &str = "DROPLESS_TEST_FULL_DISK";

/// Runs itself under a file size limit of 8 KiB, where the second checkpoint does not fit.
#[cfg(unix)]
#[test]
fn a_full_disk_is_an_error_that_leaves_older_checkpoints_and_no_trace() {
    if let Ok(out) = std::env::var(FULL_DISK) {
        let weights = [NamedTensor::f32("lm_head.weight", &[4096], &[1.0; 4096])];
        let state = state(2);
        let all = Save { out: out.as_ref(), weights: &weights, optimizer: &[], state: &state, keep: 1 };
        println!("failed with: {}", save(&host(), &all).unwrap_err());
        return;
    }
    let out = tempdir().unwrap();
    save_one(out.path(), 1, 1.0, 1).unwrap();
    let name = "a_full_disk_is_an_error_that_leaves_older_checkpoints_and_no_trace";
    let child = Command::new("bash")
        .args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$0\" --exact --nocapture \"$1\" 2>/dev/null"])
        .arg(std::env::current_exe().unwrap())
        .arg(name)
        .env(FULL_DISK, out.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout).into_owned();
    assert!(child.status.success(), "{text}");
    assert!(text.contains("failed with: ") && text.contains("model-part-0.safetensors: File too large"), "{text}");
    assert_eq!(listing(out.path()), ["step-000001"]);
    assert_eq!(value(&find(out.path()).0), 1.0);
}

#[test]
fn the_reference_model_reads() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/reference/deepseek_v3_a");
    let model = TensorFiles::open(dir.as_ref(), "model").unwrap();
    assert_eq!(model.shape("lm_head.weight").unwrap(), [256, 64]);
    let expected = TensorFiles::open(dir.as_ref(), "expected").unwrap();
    assert!(expected.ids("input_ids").unwrap().iter().all(|&id| id < 256));
    assert_eq!(expected.values("loss.f32", &[1]).unwrap().len(), 1);
    assert!(expected.ids("loss.f32").unwrap_err().to_string().contains("loss.f32 is F32"));
}
