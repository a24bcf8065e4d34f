//! The program as a user meets it: what a mistake gets (exit code 2, exactly one line on the error output, nothing
//! lost), and that a run can be broken off and go on.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use dropless::checkpoint::{Save, State, newest, save};
use dropless::config::single;
use dropless::options::BackendKind;
use dropless_core::host::{Host, HostOptions};
use dropless_model::hf::{NamedTensor, TensorFiles};
use tempfile::{TempDir, tempdir};

/// The smallest model with every kind of layer, on a small text.
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
keep_checkpoints = 0
sample_tokens = 4
[data]
train = ["text.txt"]
"#;

/// A directory with a configuration, `tiny.toml`, and its text.
fn workplace() -> TempDir {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("tiny.toml"), TINY).unwrap();
    let text: String = (0..200).map(|i| format!("line {i} of a text that repeats itself\n")).collect();
    fs::write(dir.path().join("text.txt"), text).unwrap();
    dir
}

fn dropless(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dropless")).args(arguments).current_dir(dir).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Asserts exit code 2 and one line on the error output that holds all of `words`.
fn assert_refused(output: &Output, words: &[&str]) {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(message.lines().count(), 1, "one line: {message:?}");
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
}

fn assert_done(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Trains the tiny model in `dir/run` with these further arguments.
fn train(dir: &Path, arguments: &[&str]) -> Output {
    dropless(dir, &[&["train", "tiny.toml", "--out", "run"], arguments].concat())
}

/// The digest of a run of the tiny model that nothing interrupts.
fn uninterrupted(dir: &Path, steps: &str) -> String {
    digest(&assert_done(&dropless(dir, &["train", "tiny.toml", "--out", "whole", "--steps", steps])))
}

/// The word after `digest` in what a run printed.
fn digest(stdout: &str) -> String {
    stdout.lines().find_map(|line| line.strip_prefix("digest ")).unwrap().to_owned()
}

fn checkpoint(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("run/checkpoints/step-{step:06}"))
}

#[test]
fn command_lines_that_are_none() {
    let dir = tempdir().unwrap();
    let refused = |arguments: &[&str], words: &[&str]| assert_refused(&dropless(dir.path(), arguments), words);
    refused(&[], &["subcommand", "train"]);
    refused(&["trian"], &["trian", "train"]);
    refused(&["train", "--stepz", "3"], &["--stepz", "--steps"]);
    refused(&["train", "--steps", "many"], &["--steps", "many"]);
    refused(&["train", "--numerics", "volta"], &["volta", "hopper"]);
    refused(&["generate"], &["--prompt"]);
    refused(&["generate", "--prompt", "a", "--temperature=-1"], &["--temperature is -1"]);
    refused(&["generate", "--prompt", "a", "--top-p", "1.5"], &["--top-p is 1.5"]);
    refused(&["generate", "--prompt", "a", "--ranks", "2"], &["unexpected argument '--ranks'"]);
    refused(&["generate", "--prompt", "a", "--expert-parallel", "2"], &["unexpected argument '--expert-parallel'"]);
    refused(&["eval"], &["no run in out/"]);
    refused(&["train", "--resume"], &["no run in out/"]);
    refused(&["train", "--resume", "--out", "absent"], &["--out absent"]);
    if !dropless::backends::usable(BackendKind::Cuda) {
        refused(&["train", "--backend", "cuda"], &["cuda", "--backend host"]);
        refused(&["bench", "cuda"], &["cuda", "--backend host"]);
    }
    refused(&["bench", "wgpu", "--adapter", "no such"], &["wgpu", "no adapter"]);
    refused(&["bench", "host", "--adapter", "0"], &["--adapter", "wgpu backend"]);
    refused(&["train", "--backend", "host", "--adapter", "0"], &["--adapter", "wgpu backend"]);
    refused(&["train", "--backend", "host", "--exchange", "nccl"], &["--exchange", "cuda backend"]);
    refused(&["train", "--backend", "wgpu", "--timeout", "5"], &["--timeout", "cuda backend"]);
    refused(&["bisect"], &["--backend wgpu"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was written");
}

#[test]
fn b212_misspelt_keys_and_wrong_values() {
    let dir = workplace();
    assert_refused(&train(dir.path(), &["--set", "train.batch_sise=2"]), &["train.batch_sise", "train.batch_size"]);
    assert_refused(&train(dir.path(), &["--set", "train.steps=often"]), &["train.steps", "often"]);
    fs::write(dir.path().join("tiny.toml"), "[train]\nexpert_paralel = 2\n").unwrap();
    assert_refused(&train(dir.path(), &[]), &["tiny.toml", "expert_paralel", "did you mean"]);
    assert_refused(&dropless(dir.path(), &["train", "absent.toml"]), &["absent.toml"]);
    assert!(!dir.path().join("run").exists());
}

#[test]
fn b210_shapes_that_cannot_be() {
    let dir = workplace();
    let refused = |arguments: &[&str], words: &[&str]| assert_refused(&train(dir.path(), arguments), words);
    refused(&["--set", "model.num_experts_per_tok=5"], &["num_experts_per_tok is 5", "n_routed_experts is 4"]);
    refused(&["--set", "train.recipe=mxfp8", "--set", "model.hidden_size=40"], &["hidden_size is 40", "32"]);
    refused(&["--ranks", "3"], &["n_routed_experts is 4", "3 ranks"]);
    refused(&["--set", "model.vocab_size=256"], &["vocab_size is 256", "257"]);
    assert!(!dir.path().join("run/checkpoints").exists());
}

#[test]
fn sizes_past_every_machine() {
    let dir = workplace();
    for (key, words) in [
        ("model.n_shared_experts=9223372036854775807", &["parameters", "at most"][..]),
        ("model.n_routed_experts=1099511627776", &["parameters", "at most"]),
        ("train.batch_size=4611686018427387904", &["train.batch_size is 4611686018427387904", "tokens"]),
        ("train.eps=1e-50", &["train.eps is 1e-50", "more than 0"]),
    ] {
        assert_refused(&train(dir.path(), &["--set", key]), words);
    }
    assert_refused(&train(dir.path(), &["--steps", "18446744073709551615"]), &["train.steps", "at most"]);
    assert_refused(&train(dir.path(), &["--threads", "100000000000"]), &["100000000000 threads", "at most"]);
}

#[test]
fn no_steps_leave_the_first_weights_as_a_checkpoint() {
    let dir = workplace();
    for ranks in ["1", "2"] {
        let out = format!("run-{ranks}");
        let printed = assert_done(&dropless(
            dir.path(),
            &["train", "tiny.toml", "--steps", "0", "--ranks", ranks, "--out", &out],
        ));
        assert!(printed.contains("validation loss") && printed.contains("step-000000"), "{printed}");
        assert_done(&dropless(dir.path(), &["eval", &out]));
    }
    let [one, two] = ["run-1", "run-2"].map(|out| {
        let resumed = dropless(dir.path(), &["train", "--resume", "--out", out, "--steps", "3"]);
        digest(&assert_done(&resumed))
    });
    assert_eq!((&one, &two), (&uninterrupted(dir.path(), "3"), &one));
}

/// A run that is being trained: others may read it, and nobody else may train it.
#[test]
fn a_run_belongs_to_one_process() {
    let dir = workplace();
    let mut child = Command::new(env!("CARGO_BIN_EXE_dropless"))
        .args(["train", "tiny.toml", "--out", "run", "--steps", "100000", "--set", "train.keep_checkpoints=2"])
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let run = dir.path().join("run");
    while last_step(&run) < 3 {
        assert!(child.try_wait().unwrap().is_none(), "ended too early");
        std::thread::sleep(Duration::from_millis(1));
    }
    let second = dropless(dir.path(), &["train", "--resume", "--out", "run"]);
    let read = dropless(dir.path(), &["generate", "run", "--prompt", "line", "--tokens", "1"]);
    let alive = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_refused(&second, &["run", "another process"]);
    // A checkpoint may go while it is read, but what is being saved stays.
    assert!(!text(&read.stderr).contains("removed"), "{}", text(&read.stderr));
    assert!(alive, "the run goes on");
}

#[test]
fn b240_text_that_is_not_there_or_too_short() {
    let dir = workplace();
    fs::write(dir.path().join("empty.txt"), "").unwrap();
    fs::write(dir.path().join("short.txt"), "too short").unwrap();
    let with = |pattern: &str| train(dir.path(), &["--set", &format!("data.train=[\"{pattern}\"]")]);
    assert_refused(&with("absent*.txt"), &["absent*.txt", "matches no file"]);
    assert_refused(&with("empty.txt"), &["training text is empty"]);
    assert_refused(&with("short.txt"), &["training text has 10 tokens", "needs 17"]);
    fs::write(dir.path().join("short.txt"), "long enough to train on").unwrap();
    let set = ["--set", "data.train=[\"short.txt\"]", "--set", "data.validation_fraction=0.01"];
    assert_refused(&train(dir.path(), &set), &["validation text is empty", "nothing to predict"]);
}

#[test]
fn the_effective_configuration_is_printed_and_recorded() {
    let dir = workplace();
    let changes = ["--set", "train.seed=5", "--numerics", "f32", "--steps", "1"];
    let printed = assert_done(&train(dir.path(), &[&changes[..], &["--print-config"]].concat()));
    for line in ["seed = 5", "numerics = \"f32\"", "steps = 1", "hidden_size = 32", "beta2 = 0.95"] {
        assert!(printed.contains(line), "{printed}");
    }
    assert!(!dir.path().join("run").exists());
    assert_done(&train(dir.path(), &changes));
    assert_eq!(fs::read_to_string(dir.path().join("run/config.toml")).unwrap(), printed);
}

#[test]
fn a_run_is_recorded_evaluated_and_continues_text() {
    let dir = workplace();
    let printed = assert_done(&train(dir.path(), &[]));
    for word in ["step 3/3", "validation loss", "byte-unigram entropy", "sample:"] {
        assert!(printed.contains(word), "{printed}");
    }
    let metrics = fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (saved, lines): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.get("digest").is_some());
    assert_eq!(lines.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
    for line in &lines {
        assert_eq!(line["dropped"], 0);
        let bits = u32::from_str_radix(line["loss_bits"].as_str().unwrap(), 16).unwrap();
        assert_eq!(f32::from_bits(bits), single(line["loss"].as_f64().unwrap()));
        // 64 tokens, each with 2 of the 4 experts of the one layer.
        assert_eq!(line["expert_load"]["mean"], 32.0);
    }
    let saved = saved.last().unwrap();
    assert_eq!((saved["step"].as_u64(), saved["digest"].as_str()), (Some(3), Some(&*digest(&printed))));
    // 200 bytes of corpus text would be a poor model's luck; all that is asked for is that it runs, twice alike.
    let generate = || assert_done(&dropless(dir.path(), &["generate", "run", "--prompt", "line", "--tokens", "8"]));
    assert!(generate().starts_with("line"));
    assert_eq!(generate(), generate());
    let evaluated = assert_done(&dropless(dir.path(), &["eval", "run"]));
    let loss = |text: &str| text.lines().find(|line| line.starts_with("validation loss")).unwrap().to_owned();
    assert_eq!(loss(&evaluated), loss(&printed));
}

#[test]
fn a_run_that_is_there_is_not_overwritten() {
    let dir = workplace();
    assert_done(&train(dir.path(), &["--steps", "1"]));
    assert_refused(&train(dir.path(), &["--steps", "1"]), &["--out run holds a run already", "--resume"]);
    // Without --out, each run has a directory of its own.
    for number in 1..=2 {
        assert_done(&dropless(dir.path(), &["train", "tiny.toml", "--steps", "1"]));
        assert!(dir.path().join(format!("out/run-{number}/checkpoints/step-000001")).exists());
    }
}

#[test]
fn what_is_no_directory_holds_no_run() {
    let dir = workplace();
    fs::write(dir.path().join("file"), "mine").unwrap();
    for out in ["file", "file/run"] {
        let refused = dropless(dir.path(), &["train", "tiny.toml", "--out", out]);
        assert_refused(&refused, &["file is no directory"]);
    }
    assert_eq!(fs::read(dir.path().join("file")).unwrap(), b"mine");
}

#[test]
fn a_run_without_a_checkpoint_is_not_one_to_resume() {
    let dir = workplace();
    // What a process leaves that was ended before its first checkpoint.
    fs::create_dir(dir.path().join("run")).unwrap();
    fs::write(dir.path().join("run/metrics.jsonl"), "{\"step\":1,\"loss\":5.0,\"loss_bits\":\"40a00000\"}\n").unwrap();
    let begun = train(dir.path(), &["--steps", "1"]);
    assert_refused(&begun, &["--out run holds a run already (metrics.jsonl)", "remove the directory"]);
    assert!(!text(&begun.stderr).contains("--resume"));
    assert_refused(&train(dir.path(), &["--resume"]), &["no checkpoint in checkpoints/", "remove the directory"]);
}

#[test]
fn a_run_that_was_ended_before_its_first_step_begins_anew_where_it_was() {
    let dir = workplace();
    let run = dir.path().join("run");
    let probed = run.join("checkpoints/step-00000000000000000000.tmp-old-77");
    let leave = || {
        fs::create_dir_all(run.join("tokenizer")).unwrap();
        fs::create_dir_all(&probed).unwrap();
        fs::write(probed.join("optimizer-99999-of-99999.safetensors"), "probe").unwrap();
        fs::write(run.join("tokenizer/tokenizer.json"), "{}").unwrap();
        fs::write(run.join("tokenizer/special_tokens.json"), "{}").unwrap();
        for (name, text) in [("lock", "77 1\n"), ("metrics.jsonl", ""), ("config.toml", "[tr"), ("config.toml.tmp", "")]
        {
            fs::write(run.join(name), text).unwrap();
        }
    };
    leave();
    assert_refused(&train(dir.path(), &["--resume"]), &["no checkpoint in checkpoints/", "without --resume"]);
    assert_done(&train(dir.path(), &["--steps", "1"]));
    assert!(!run.join("tokenizer").exists() && !probed.exists());
    assert!(fs::read_to_string(run.join("config.toml")).unwrap().contains("hidden_size = 32"));
    // A configuration that lies there on its own is somebody's.
    fs::remove_dir_all(&run).unwrap();
    fs::create_dir(&run).unwrap();
    fs::write(run.join("config.toml"), "").unwrap();
    assert_refused(&train(dir.path(), &["--steps", "1"]), &["--out run holds a run already (config.toml)"]);
}

/// A process was killed after it had completed a checkpoint, and before it wrote so.
#[test]
fn f18_the_line_of_a_checkpoint_is_written_by_who_goes_on_from_it() {
    let dir = workplace();
    assert_done(&train(dir.path(), &["--steps", "2"]));
    let path = dir.path().join("run/metrics.jsonl");
    let whole = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = whole.lines().collect();
    let (last, before) = lines.split_last().unwrap();
    let without = before.join("\n") + "\n";
    let expected = format!("{}\"copy_s\":null,\"write_s\":null}}", &last[..last.find("\"copy_s\"").unwrap()]);
    // Where the run goes on, and where there is nothing left to do; once.
    for steps in ["2", "2", "3"] {
        fs::write(&path, &without).unwrap();
        for _ in 0..2 {
            assert_done(&train(dir.path(), &["--resume", "--steps", steps]));
        }
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().filter(|line| **line == *expected).count(), 1, "{text}");
        let saved = text.lines().filter(|line| line.contains("digest")).count();
        assert_eq!(saved, if steps == "3" { 3 } else { 2 }, "{text}");
    }
}

#[test]
fn a_checkpoint_of_another_configuration_is_refused() {
    let dir = workplace();
    assert_done(&train(dir.path(), &["--steps", "1"]));
    // Its weights would fill a part of another model, or a model that computes something else.
    for (set, words) in [
        ("model.hidden_size=64", "model.hidden_size is 64, but 32 in the model of run/checkpoints/step-000001"),
        ("model.rope_theta=50.0", "model.rope_theta is 50.0, but "),
    ] {
        assert_refused(&dropless(dir.path(), &["eval", "run", "--backend", "host", "--set", set]), &[words]);
        let generate = ["generate", "run", "--backend", "host", "--prompt", "a", "--set", set];
        assert_refused(&dropless(dir.path(), &generate), &[words]);
    }
    let resumed = train(dir.path(), &["--resume", "--set", "model.hidden_size=64"]);
    assert_refused(&resumed, &["model.hidden_size is 64", "checkpoint was made with 32"]);
    let resumed = train(dir.path(), &["--resume", "--set", "train.grad_shards=2"]);
    assert_refused(&resumed, &["train.grad_shards is 2", "4"]);
}

/// Lines on the error output that are not the one that ends a run.
fn notes(output: &Output) -> Vec<String> {
    text(&output.stderr).lines().map(str::to_owned).collect()
}

#[test]
fn b18c_a_damaged_checkpoint_falls_back_to_the_previous_one() {
    let dir = workplace();
    let whole = digest(&assert_done(&train(dir.path(), &[])));
    let path = checkpoint(dir.path(), 3).join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 10]).unwrap();
    // As of a process that was killed while it saved.
    fs::create_dir(dir.path().join("run/checkpoints/step-000004.tmp-1")).unwrap();
    let resumed = dropless(dir.path(), &["train", "--out", "run", "--resume"]);
    assert_eq!(digest(&assert_done(&resumed)), whole, "step 3 is done again, with the same bits");
    let notes = notes(&resumed);
    assert!(notes.iter().any(|n| n.contains("step-000003") && n.contains("previous checkpoint")), "{notes:?}");
    assert!(notes.iter().any(|n| n.contains("step-000004.tmp-1")), "{notes:?}");
    assert_done(&dropless(dir.path(), &["eval", "run"]));
}

/// The portable program cannot hear that a file may grow no more, and is ended.
#[cfg(all(unix, not(dropless_portable)))]
#[test]
fn a_full_disk_while_saving_stops_the_run_and_loses_nothing() {
    let dir = workplace();
    let whole = uninterrupted(dir.path(), "3");
    assert_done(&train(dir.path(), &["--steps", "1"]));
    // Half of a checkpoint's largest file fits.
    let largest = fs::metadata(checkpoint(dir.path(), 1).join("optimizer.safetensors")).unwrap().len();
    let script = format!("ulimit -f {}; exec \"$0\" \"$@\"", largest / 2 / 1024);
    let full = Command::new("bash")
        .args(["-c", &script, env!("CARGO_BIN_EXE_dropless")])
        .args(["train", "--out", "run", "--resume", "--steps", "3"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert_refused(&full, &["step-000002", "safetensors", "File too large"]);
    let left: Vec<_> =
        fs::read_dir(dir.path().join("run/checkpoints")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["step-000001"]);
    let resumed = dropless(dir.path(), &["train", "--out", "run", "--resume", "--steps", "3"]);
    assert_eq!(digest(&assert_done(&resumed)), whole);
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint() {
    let dir = workplace();
    // After the first step, a rate of 1e6 throws the weights far beyond what the loss can hold.
    let run =
        train(dir.path(), &["--set", "train.learning_rate=1e6", "--set", "train.max_grad_norm=0.0", "--steps", "50"]);
    assert_refused(&run, &["step ", "not finite", "last good checkpoint: run/checkpoints/step-"]);
    assert!(dropless(dir.path(), &["eval", "run"]).status.success());
}

/// Infinity in one weight of a checkpoint whose hashes are right.
#[test]
fn a_weight_that_is_not_finite_is_named_whatever_rank_has_it() {
    let dir = workplace();
    for weight in ["model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight"] {
        let _ = fs::remove_dir_all(dir.path().join("run"));
        assert_done(&train(dir.path(), &["--steps", "1"]));
        let good = newest(&dir.path().join("run")).unwrap().checkpoint.unwrap();
        let all =
            |files: &TensorFiles| -> Vec<NamedTensor> { files.names().map(|name| files.get(name).unwrap()).collect() };
        let (mut weights, optimizer) = (all(&good.weights), all(&good.optimizer));
        weights.iter_mut().find(|t| t.name == weight).unwrap().bytes[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        let state = State { step: 2, ..good.state };
        let out = dir.path().join("run");
        let bad = Save { out: &out, weights: &weights, optimizer: &optimizer, state: &state, keep: 0 };
        save(&Host::new(HostOptions::default()).unwrap(), &bad).unwrap();
        for ranks in ["1", "2", "4"] {
            let run = dropless(dir.path(), &["train", "--resume", "--out", "run", "--steps", "5", "--ranks", ranks]);
            assert_refused(&run, &["step 3", weight, "not finite", "step-000002"]);
        }
    }
}

/// The largest step among the checkpoints in `run`, those that are being written included.
fn last_step(run: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return 0 };
    let step = |name: String| name.strip_prefix("step-")?.get(..6)?.parse().ok();
    entries.filter_map(|entry| step(entry.ok()?.file_name().into_string().ok()?)).max().unwrap_or(0)
}

/// Killed as soon as a checkpoint shows, under its final or its temporary name, so at another point each time.
#[test]
fn a_killed_run_goes_on_with_the_same_bits() {
    let dir = workplace();
    let whole = uninterrupted(dir.path(), "9");
    let run = dir.path().join("run");
    let arguments = || {
        let saved = newest(&run).unwrap().checkpoint.is_some();
        if !saved {
            // Killed before its first checkpoint, it begins again.
            let _ = fs::remove_dir_all(&run);
        }
        ["train", "--out", "run", "--steps", "9", if saved { "--resume" } else { "tiny.toml" }]
    };
    for step in [1, 2, 4, 7] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_dropless"))
            .args(arguments())
            .current_dir(dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while last_step(&run) < step {
            assert!(child.try_wait().unwrap().is_none(), "ended before step {step}");
            std::thread::sleep(Duration::from_micros(100));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert_eq!(digest(&assert_done(&dropless(dir.path(), &arguments()))), whole);
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let steps = metrics.lines().filter(|line| line.contains("\"loss\""));
    assert_eq!(steps.count(), 9, "each step is recorded once");
}

#[test]
fn doctor_says_what_there_is() {
    let dir = tempdir().unwrap();
    let printed = assert_done(&dropless(dir.path(), &["doctor"]));
    for line in ["host  available", "wgpu  ", "cuda  "] {
        assert!(printed.contains(line), "{printed}");
    }
}

const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/reference");

#[test]
fn f24_verify_names_what_it_ignores_and_lists_what_it_cannot_compare() {
    let dir = tempdir().unwrap();
    let reference = Path::new(REFERENCE).join("deepseek_next_token_module");
    let printed = assert_done(&dropless(dir.path(), &["verify", reference.to_str().unwrap()]));
    assert!(printed.contains("grad.model.layers.2.eh_proj.weight"), "{printed}");
    assert!(printed.ends_with("32 tensors, 0 past the bound, 19 not compared\n"), "{printed}");

    for file in ["model.safetensors", "expected.safetensors"] {
        fs::copy(reference.join(file), dir.path().join(file)).unwrap();
    }
    let config = fs::read_to_string(reference.join("config.json")).unwrap();
    let without = config.replace("\"num_nextn_predict_layers\": 1", "\"num_nextn_predict_layers\": 0, \"novelty\": 3");
    assert_ne!(without, config);
    fs::write(dir.path().join("config.json"), without).unwrap();
    let output = dropless(dir.path(), &["verify", ".", "--ranks", "2"]);
    assert!(assert_done(&output).ends_with("32 tensors, 0 past the bound\n"));
    let notes = text(&output.stderr);
    let lines = |word: &str| notes.lines().filter(|line| line.starts_with("note: ") && line.contains(word)).count();
    assert_eq!((lines("novelty"), lines("model.layers.2.")), (1, 1), "{notes}");
}

#[test]
fn verify_passes_the_reference_and_fails_a_model_that_is_not_it() {
    let dir = tempdir().unwrap();
    let reference = Path::new(REFERENCE).join("deepseek_v3_a");
    let printed = assert_done(&dropless(dir.path(), &["verify", reference.to_str().unwrap()]));
    assert!(printed.contains("logits.f32") && printed.contains(" 0 past the bound"), "{printed}");

    let name = |file: &str| (reference.join(file), dir.path().join(file));
    for file in ["config.json", "model.safetensors", "expected.safetensors"] {
        let (from, to) = name(file);
        fs::copy(from, to).unwrap();
    }
    let path = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    // The last element of the file is the last of a norm weight: doubled, by its exponent.
    let last = bytes.len() - 2;
    bytes[last] ^= 0x80;
    fs::write(&path, bytes).unwrap();
    let output = dropless(dir.path(), &["verify", "."]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("FAILED"));
    fs::write(dir.path().join("config.json"), "{\"model_type\": \"llama\"}").unwrap();
    assert_refused(&dropless(dir.path(), &["verify", "."]), &["config.json", "llama", "deepseek_v3"]);
    fs::write(dir.path().join("config.json"), r#"{"model_type": "two\nlines"}"#).unwrap();
    assert_refused(&dropless(dir.path(), &["verify", "."]), &["config.json", r"two\nlines"]);
}

/// A run whose standard output and error are like that, in `dir/run`.
#[cfg(unix)]
fn train_into(dir: &Path, arguments: &[&str], stdout: Stdio, stderr: Stdio) -> std::process::Child {
    Command::new(env!("CARGO_BIN_EXE_dropless"))
        .args([&["train", "--out", "run"], arguments].concat())
        .current_dir(dir)
        .stdout(stdout)
        .stderr(stderr)
        .spawn()
        .unwrap()
}

/// The exit code; the process is ended if it has none within a minute.
#[cfg(unix)]
fn code_in_time(child: &mut std::process::Child) -> Option<i32> {
    let started = std::time::Instant::now();
    while child.try_wait().unwrap().is_none() && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap().code()
}

/// Full, closed and never read: what the program has to say is lost, and nothing else.
#[cfg(unix)]
#[test]
fn f05_no_output_ends_or_holds_a_run() {
    let dir = workplace();
    let whole = uninterrupted(dir.path(), "3");
    let full = || Stdio::from(fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
    let closed = || Stdio::from(std::io::pipe().unwrap().1);
    // A pipe that is full already, and its other end, which nobody reads.
    let unread = || {
        let (reader, writer) = std::io::pipe().unwrap();
        let mut clone = writer.try_clone().unwrap();
        std::thread::spawn(move || std::io::Write::write_all(&mut clone, &vec![b'x'; 4 << 20]));
        std::thread::sleep(Duration::from_millis(100));
        (Stdio::from(writer), reader)
    };
    let ends = |stdout: Stdio, stderr: Stdio, how: &str| {
        let run = dir.path().join("run");
        let _ = fs::remove_dir_all(&run);
        assert_done(&train(dir.path(), &["--steps", "2"]));
        // There is something to say of it on the error output.
        let damaged = checkpoint(dir.path(), 2).join("state.json");
        fs::write(damaged, "{").unwrap();
        let code = code_in_time(&mut train_into(dir.path(), &["--resume", "--steps", "3"], stdout, stderr));
        assert_eq!(code, Some(0), "{how}");
        let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        assert!(metrics.lines().last().unwrap().contains(&whole), "{how}: {metrics}");
        let refused = ["tiny.toml", "--resume", "--set", "bogus=1"];
        code_in_time(&mut train_into(dir.path(), &refused, full(), closed()))
    };
    assert_eq!(ends(full(), full(), "full"), Some(2));
    assert_eq!(ends(closed(), closed(), "closed"), Some(2));
    let ((stdout, _out), (stderr, _err)) = (unread(), unread());
    assert_eq!(ends(stdout, stderr, "never read"), Some(2));
    let (stderr, _err) = unread();
    let refused = ["tiny.toml", "--resume", "--set", "bogus=1"];
    assert_eq!(code_in_time(&mut train_into(dir.path(), &refused, full(), stderr)), Some(2));
}

#[test]
fn f14_f19_one_value_in_a_set_and_no_control_characters_in_messages() {
    let dir = workplace();
    let refused = |arguments: &[&str], words: &[&str]| {
        let output = train(dir.path(), arguments);
        assert_refused(&output, words);
        assert!(!output.stderr.contains(&0x1b), "{output:?}");
    };
    refused(&["--set", "train.steps=5\ntrain.seed=77"], &["train.steps=5\\ntrain.seed=77", "expected one value"]);
    refused(&["--set", &format!("{}b=1", "a.".repeat(50_000))], &["50001 parts"]);
    refused(&["--set", "train.recipe=\u{1b}]0;title\u{7}"], &["\\u{1b}]0;title\\u{7}"]);
    refused(&["--steps", "3\u{1b}[2J\nUsage: x"], &["3\\u{1b}[2J\\nUsage: x", "expected a whole number"]);
    refused(&["--set", "data.train=[\"no\\n\\u001bfile\"]"], &["no\\n\\u{1b}file"]);
}

#[test]
fn f25_a_warning_comes_before_the_first_step() {
    let dir = workplace();
    let set = ["--set", "model.num_experts_per_tok=1", "--set", "train.aux_loss_coefficient=0.0"];
    let output = train(dir.path(), &set);
    assert_done(&output);
    assert!(notes(&output)[0].starts_with("warning: the gradient of every router is 0"), "{:?}", notes(&output));
}

#[test]
fn f29_words() {
    let dir = workplace();
    let refused = |arguments: &[&str], words: &[&str]| assert_refused(&dropless(dir.path(), arguments), words);
    refused(&["train", "--seed", "3"], &["--set train.seed=3"]);
    refused(&["train", "--learning-rate=1e-3"], &["--set train.learning_rate=1e-3"]);
    refused(&["bisect", "--backend", "wgpu", "--recipe", "mxfp8"], &["--set train.recipe=mxfp8"]);
    refused(&["train", "--stepz", "3"], &["--steps"]);
    refused(&["train", "--steps", "many"], &["'many'", "expected a whole number"]);
    // Options are there where they work.
    for (command, absent) in [
        ("generate", &["--ranks", "--expert-parallel", "--exchange", "--timeout"][..]),
        ("bisect", &["--exchange", "--timeout"]),
    ] {
        let help = assert_done(&dropless(dir.path(), &[command, "--help"]));
        assert!(help.contains("--backend"), "{help}");
        assert_eq!(absent.iter().find(|option| help.contains(**option)), None, "{command}");
    }
    let printed = assert_done(&train(dir.path(), &[]));
    assert!(printed.contains("host on 1 rank: "), "{printed}");
    assert!(printed.lines().all(|line| !line.starts_with("step ") || line.len() <= 80), "{printed}");
    assert!(printed.contains("expert load ") && printed.contains(", mean 32"), "{printed}");
    assert!(printed.contains("peak memory of the process ") && printed.contains(" MiB\n"), "{printed}");
}

/// The program among the variables that a launcher may set.
fn among(dir: &Path, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dropless"));
    command.args(arguments).envs(variables.iter().copied()).current_dir(dir).output().unwrap()
}

#[test]
fn f10_a_shell_inside_an_allocation_of_slurm_runs_alone() {
    let dir = workplace();
    assert_done(&train(dir.path(), &["--steps", "1"]));
    let job = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "gpu[1-2]")];
    let shell = [&job[..], &[("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_NTASKS", "4")]].concat();
    let eval = ["eval", "run", "--backend", "host"];
    assert_done(&among(dir.path(), &shell, &eval));
    assert_done(&among(dir.path(), &[&shell[..], &[("SLURM_STEP_NUM_TASKS", "1")]].concat(), &eval));
    let task = among(dir.path(), &[&shell[..], &[("SLURM_STEP_NUM_TASKS", "4")]].concat(), &eval);
    assert_refused(&task, &["a launcher started several processes"]);
}

#[test]
fn f10_a_nonsensical_environment_is_refused_on_every_backend() {
    let dir = workplace();
    for backend in ["auto", "host", "wgpu", "cuda"] {
        let refused = |variables: &[(&str, &str)], words: &[&str]| {
            let arguments = ["train", "tiny.toml", "--print-config", "--backend", backend];
            assert_refused(&among(dir.path(), variables, &arguments), words);
        };
        refused(&[("RANK", "5"), ("WORLD_SIZE", "2")], &["RANK is 5, expected less than WORLD_SIZE, which is 2"]);
        refused(&[("MASTER_PORT", "99999")], &["MASTER_PORT is 99999, expected a port, 1 to 65535"]);
        refused(&[("SLURM_STEP_NUM_TASKS", "two")], &["SLURM_PROCID is not set"]);
    }
}

#[test]
fn f20_several_processes_without_a_secret_are_told_which_variable_to_set() {
    let dir = workplace();
    let torchrun = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];
    let train = ["train", "tiny.toml", "--out", "run"];
    if cfg!(all(feature = "cuda", target_os = "linux", not(dropless_portable))) {
        let words = ["DROPLESS_SECRET is not set", "DROPLESS_SECRET_FILE", "dropless launch"];
        assert_refused(&among(dir.path(), &torchrun, &train), &words);
        let short = [&torchrun[..], &[("DROPLESS_SECRET", "guess me")]].concat();
        assert_refused(&among(dir.path(), &short, &train), &["DROPLESS_SECRET is 8 bytes, expected 16 to 4096"]);
        // A file that others may read holds no secret.
        fs::write(dir.path().join("secret"), "0123456789abcdef0123456789abcdef").unwrap();
        let file = [&torchrun[..], &[("DROPLESS_SECRET_FILE", "secret")]].concat();
        for (mode, refused) in [("640", true), ("604", true), ("600", false), ("400", false)] {
            assert!(Command::new("chmod").args([mode, "secret"]).current_dir(dir.path()).status().unwrap().success());
            let said = text(&among(dir.path(), &file, &[&train[..], &["--timeout", "5"]].concat()).stderr);
            assert_eq!(said.contains(&format!("(mode {mode}): chmod 600 secret")), refused, "{said}");
        }
    }
    // Ranks that are threads have nothing to prove.
    assert_done(&dropless(dir.path(), &[&train[..], &["--backend", "host", "--ranks", "2", "--steps", "1"]].concat()));
}

#[cfg(all(feature = "cuda", target_os = "linux", not(dropless_portable)))]
#[test]
fn f21_a_driver_that_is_too_old_is_one_line() {
    let dir = workplace();
    fs::write(dir.path().join("driver.c"), "int cuDriverGetVersion(int *to) { *to = 12040; return 0; }\n").unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o", "libcuda.so", "driver.c"]).current_dir(dir.path());
    if !compiler.status().is_ok_and(|status| status.success()) {
        println!("skipped: no C compiler");
        return;
    }
    let path = [("LD_LIBRARY_PATH", dir.path().to_str().unwrap())];
    let words = ["cuda: the driver 12.4 is older than 13.0 (580)"];
    assert_refused(&among(dir.path(), &path, &["train", "tiny.toml", "--backend", "cuda"]), &words);
    let report = assert_done(&among(dir.path(), &path, &["doctor"]));
    assert!(report.contains(words[0]), "{report}");
}
