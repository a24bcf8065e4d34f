//! Model directories at the command line: `convert`, `inspect`, `eval` and `generate` of one, and training that begins
//! with one.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use dropless_model::hf::{ModelDir, TensorFiles};
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

const TRAIN: &str = r#"
[train]
steps = 3
batch_size = 4
micro_batch_size = 4
sequence_length = 16
warmup_steps = 1
checkpoint_interval = 1
keep_checkpoints = 0
sample_tokens = 0
[data]
train = ["text.txt"]
"#;

const MODEL: &str = r#"
[model]
family = "mixtral"
vocab_size = 257
hidden_size = 32
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
num_local_experts = 4
num_experts_per_tok = 2
max_position_embeddings = 16
"#;

/// A directory with a text, two configurations, and a model in `model`: fused experts in bf16, two files.
fn workplace() -> TempDir {
    let dir = tempdir().unwrap();
    let text: String = (0..200).map(|i| format!("line {i} of a text that repeats itself\n")).collect();
    fs::write(dir.path().join("text.txt"), text).unwrap();
    fs::write(dir.path().join("train.toml"), TRAIN).unwrap();
    fs::write(dir.path().join("first.toml"), format!("{MODEL}{TRAIN}")).unwrap();
    done(&dropless(dir.path(), &["train", "first.toml", "--out", "first", "--steps", "1"]));
    let checkpoint = "first/checkpoints/step-000001";
    let wish = ["--experts", "fused", "--dtype", "bf16", "--shard-size", "60KB"];
    done(&dropless(dir.path(), &[&["convert", checkpoint, "model"], &wish[..]].concat()));
    dir
}

fn dropless(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dropless")).args(arguments).current_dir(dir).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn done(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Asserts exit code 2 and one line on the error output that holds all of `words`.
fn refused(output: &Output, words: &[&str]) {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(message.lines().count(), 1, "one line: {message:?}");
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn digest(stdout: &str) -> String {
    stdout.lines().find_map(|line| line.strip_prefix("digest ")).unwrap().to_owned()
}

#[test]
fn a_checkpoint_names_the_ids_of_the_tokenizer() {
    let dir = workplace();
    for place in ["first/checkpoints/step-000001", "model"] {
        let config = json_of(&dir.path().join(place).join("config.json"));
        assert_eq!((&config["eos_token_id"], &config["bos_token_id"]), (&json!(256), &Value::Null), "{place}");
        assert!(config.as_object().unwrap().contains_key("bos_token_id"), "absent would mean 1");
        let generation = json_of(&dir.path().join(place).join("generation_config.json"));
        assert_eq!(generation, json!({ "_from_model_config": true, "eos_token_id": 256 }), "{place}");
    }
}

#[test]
fn a_model_directory_is_inspected_evaluated_and_continued() {
    let dir = workplace();
    let table = done(&dropless(dir.path(), &["inspect", "model"]));
    for word in ["mixtral", "2: 0 dense, 2 MoE", "fused experts", "BF16", "2 for a token"] {
        assert!(table.contains(word), "{table}");
    }
    let evaluated = |arguments: &[&str]| -> String {
        let out = done(&dropless(dir.path(), &[&["eval", "model"], arguments].concat()));
        assert!(out.starts_with("model\n"), "{out}");
        out.lines().nth(1).unwrap().to_owned()
    };
    let set = ["--set", "data.train=[\"text.txt\"]", "--set", "train.micro_batch_size=4"];
    let loss = evaluated(&set);
    assert!(loss.starts_with("validation loss "), "{loss}");
    assert_eq!(evaluated(&["--config", "train.toml"]), loss);
    // The same weights in the other layout, in f32 and one file.
    done(&dropless(dir.path(), &["convert", "model", "other", "--experts", "separate", "--dtype", "f32"]));
    let other = done(&dropless(dir.path(), &[&["eval", "other"], &set[..]].concat()));
    assert_eq!(other.lines().nth(1).unwrap(), loss);
    let generate =
        |model: &str| done(&dropless(dir.path(), &["generate", model, "--prompt", "line ", "--tokens", "8"]));
    assert_eq!(generate("model"), generate("other"));
    refused(
        &dropless(dir.path(), &["eval", "first", "--config", "train.toml"]),
        &["--config train.toml", "model directory"],
    );
}

#[test]
fn training_begins_with_the_weights_and_goes_on_without_the_directory() {
    let dir = workplace();
    let begin = |out: &str, more: &[&str]| {
        let all = ["train", "train.toml", "--init", "model", "--out", out];
        done(&dropless(dir.path(), &[&all, more].concat()))
    };
    // No step: the weights are those of the directory, the optimizer's state is zero.
    begin("none", &["--steps", "0"]);
    let checkpoint = dir.path().join("none/checkpoints/step-000000");
    let (model, files) =
        (ModelDir::open(&dir.path().join("model")).unwrap(), TensorFiles::open(&checkpoint, "model").unwrap());
    for name in files.names() {
        let (mut values, found) = (Vec::new(), files.get(name).unwrap());
        model
            .weights
            .read(name, |_, block| {
                values.extend_from_slice(block);
                Ok(())
            })
            .unwrap();
        assert_eq!(found.bytes, values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>(), "{name}");
    }
    let optimizer = TensorFiles::open(&checkpoint, "optimizer").unwrap();
    assert!(optimizer.names().all(|name| optimizer.get(name).unwrap().bytes.iter().all(|&b| b == 0)));
    // Back to the directory's own form, byte for byte.
    let wish = ["--experts", "fused", "--dtype", "bf16", "--shard-size", "60KB"];
    done(&dropless(dir.path(), &[&["convert", "none/checkpoints/step-000000", "back"], &wish[..]].concat()));
    let mut names: Vec<_> = fs::read_dir(dir.path().join("model")).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert!(names.len() > 4, "{names:?}");
    for name in names {
        let [a, b] = ["model", "back"].map(|place| fs::read(dir.path().join(place).join(&name)).unwrap());
        assert!(a == b, "{name:?}");
    }

    let whole = digest(&begin("whole", &[]));
    assert_ne!(whole, digest(&begin("none2", &["--steps", "0"])));
    assert_eq!(digest(&begin("ranks", &["--ranks", "2"])), whole);
    let config = fs::read_to_string(dir.path().join("whole/config.toml")).unwrap();
    assert!(config.contains("[origin]") && config.contains("directory = "), "{config}");
    // A run's configuration begins again with the same weights.
    let again = done(&dropless(dir.path(), &["train", "whole/config.toml", "--out", "again"]));
    assert_eq!(digest(&again), whole);
    begin("part", &["--steps", "1"]);
    fs::remove_dir_all(dir.path().join("model")).unwrap();
    let resumed = done(&dropless(dir.path(), &["train", "--resume", "--out", "part", "--steps", "3"]));
    assert_eq!(digest(&resumed), whole);
    // Without a checkpoint there is nothing to go on from.
    refused(
        &dropless(dir.path(), &["train", "whole/config.toml", "--out", "gone"]),
        &["model/config.json", "No such file"],
    );
    assert!(!dir.path().join("gone").exists());
}

#[test]
fn ids_of_the_origin_stay() {
    let dir = workplace();
    let path = dir.path().join("model/config.json");
    let mut config = json_of(&path);
    config["eos_token_id"] = json!([7, 8]);
    config["bos_token_id"] = json!(6);
    fs::write(&path, config.to_string()).unwrap();
    let arguments = ["train", "train.toml", "--init", "model", "--out", "run", "--steps", "1"];
    done(&dropless(dir.path(), &arguments));
    done(&dropless(dir.path(), &["train", "--resume", "--out", "run", "--steps", "2"]));
    let written = json_of(&dir.path().join("run/checkpoints/step-000002/config.json"));
    assert_eq!((&written["eos_token_id"], &written["bos_token_id"]), (&json!([7, 8]), &json!(6)));
}

#[test]
fn another_model_than_the_directory_has_is_refused() {
    let dir = workplace();
    let init = |more: &[&str]| {
        dropless(dir.path(), &[&["train", "train.toml", "--init", "model", "--out", "run"], more].concat())
    };
    refused(&init(&["--set", "model.hidden_size=64"]), &["--set: model.hidden_size is 64", "32", "model"]);
    refused(&init(&["--set", "model.family=qwen3_moe"]), &["model.family is \"qwen3_moe\"", "\"mixtral\""]);
    refused(&init(&["--set", "origin.directory=x"]), &["origin"]);
    refused(&init(&["--resume"]), &["--init", "--resume"]);
    refused(&dropless(dir.path(), &["train", "--init", "absent"]), &["absent/config.json"]);
    // What repeats the directory's values, or changes no weight, may stand there.
    let more = [
        "--set",
        "model.hidden_size=32",
        "--set",
        "model.rope_theta=10000",
        "--set",
        "model.max_position_embeddings=32",
        "--steps",
        "1",
    ];
    done(&init(&[&more[..], &["--set", "train.sequence_length=32"]].concat()));
    // The directory became another model before the run had a checkpoint.
    let config = fs::read_to_string(dir.path().join("run/config.toml")).unwrap();
    fs::write(dir.path().join("run.toml"), config.replace("rms_norm_eps = ", "rms_norm_eps = 0.1 # ")).unwrap();
    refused(
        &dropless(dir.path(), &["train", "run.toml", "--out", "other"]),
        &["model.rms_norm_eps is 0.1", "in the model of"],
    );
}

#[test]
fn conversions_that_are_none() {
    let dir = workplace();
    let convert = |more: &[&str]| dropless(dir.path(), &[&["convert", "model", "out"], more].concat());
    refused(&convert(&["--shard-size", "big"]), &["--shard-size", "big", "5GB"]);
    refused(&convert(&["--shard-size", "0GB"]), &["--shard-size", "0GB"]);
    refused(&convert(&["--dtype", "int4"]), &["--dtype", "int4", "bf16"]);
    refused(&dropless(dir.path(), &["convert", "model", "first"]), &["first", "exists already"]);
    refused(&dropless(dir.path(), &["convert", "first", "out"]), &["first/config.json"]);
    assert!(!dir.path().join("out").exists());
    // What is ignored is said once, and does not fail.
    let path = dir.path().join("model/config.json");
    let mut config = json_of(&path);
    config["a_key"] = json!(1);
    fs::write(&path, config.to_string()).unwrap();
    let output = convert(&["--shard-size", "1MiB"]);
    done(&output);
    assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("a_key"));
    assert!(dir.path().join("out/model.safetensors").exists());
    assert!(fs::read_dir(dir.path()).unwrap().all(|e| !e.unwrap().file_name().to_string_lossy().contains(".tmp-")));
}
