//! Configurations: defaults, overrides, and the one line that each mistake gets.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dropless::Config;
use dropless::config::{ModelConfig, Policy, Recipe};
use dropless_model::families::DeepseekV3;
use dropless_model::hf::SpecialTokens;
use dropless_model::rope::Scaling;

fn load(overrides: &[&str]) -> dropless::Result<Config> {
    Config::load(None, &overrides.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
}

/// The message of the error that `overrides` lead to, on `ranks` ranks.
fn refusal(ranks: usize, overrides: &[&str]) -> String {
    let message =
        load(overrides).and_then(|c| c.check(ranks, ranks).and_then(|()| c.check_data())).unwrap_err().to_string();
    assert!(!message.contains('\n'), "one line: {message}");
    message
}

fn assert_names(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "{message:?} does not name {word}");
    }
}

#[test]
fn the_defaults_are_valid_for_one_two_and_four_ranks() {
    let config = load(&[]).unwrap();
    for ranks in [1, 2, 4] {
        config.check(ranks, ranks).unwrap();
    }
}

#[test]
fn the_configuration_for_gpus_is_valid_for_as_many_as_the_readme_starts() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let config = Config::load(Some(&root.join("configs/h200-2b.toml")), &[]).unwrap();
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let launched: Vec<usize> = readme
        .lines()
        .filter(|line| line.contains("configs/h200-2b.toml"))
        .filter_map(|line| line.split("--nproc ").nth(1)?.split(' ').next()?.parse().ok())
        .collect();
    assert!(!launched.is_empty());
    for ranks in launched.into_iter().chain([1]) {
        config.check(ranks, ranks).unwrap();
    }
}

#[test]
fn the_effective_configuration_reads_back() {
    let config = load(&[
        "train.seed=7",
        "train.recipe=mxfp8",
        "activations.qkv=recompute",
        "data.train=[\"a/*.txt\"]",
        "model.rope_scaling.type=yarn",
        "model.rope_scaling.factor=4.0",
        "model.rope_scaling.original_max_position_embeddings=32",
    ])
    .unwrap();
    assert_eq!((config.train.seed, config.train.recipe), (7, Recipe::Mxfp8));
    assert_eq!(config.activations.qkv, Policy::Recompute);
    assert_eq!(beta_fast(&config), 32.0);
    assert_eq!(Config::from_toml(&config.to_toml(), "config.toml").unwrap(), config);
}

#[test]
fn a_file_overrides_defaults_and_set_overrides_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    std::fs::write(&path, "[train]\nsteps = 5\nseed = 6\n").unwrap();
    let config = Config::load(Some(&path), &["train.seed = 9".into()]).unwrap();
    assert_eq!((config.train.steps, config.train.seed), (5, 9));
}

#[test]
fn b212_a_misspelt_key_is_refused_with_the_nearest_name() {
    assert_names(&refusal(1, &["train.batch_sise=2"]), &["train.batch_sise", "train.batch_size"]);
    assert_names(&refusal(1, &["moe.chunk=2"]), &["moe.chunk,", "moe.chunks"]);
    assert_names(&refusal(1, &["modle.vocab_size=2"]), &["modle", "model"]);
    assert_names(&refusal(1, &["expert_paralel=2"]), &["expert_paralel", "did you mean"]);
    assert_names(&refusal(1, &["model.rope_scaling.betafast=2"]), &["model.rope_scaling.beta_fast"]);
}

#[test]
fn b212_a_value_of_the_wrong_type_is_refused_with_its_path() {
    assert_names(&refusal(1, &["train.steps=\"many\""]), &["train.steps", "many"]);
    assert_names(&refusal(1, &["train.recipe=fp7"]), &["train.recipe", "fp7", "bf16"]);
    assert_names(&refusal(1, &["model=3"]), &["model"]);
    assert_names(&refusal(1, &["train.steps"]), &["--set", "key=value"]);
}

#[test]
fn the_numbers_of_yarn_are_finite() {
    let yarn = |numbers: &str| {
        format!(r#"model.rope_scaling={{type="yarn", factor=2.0, original_max_position_embeddings=64, {numbers}}}"#)
    };
    for number in ["mscale", "mscale_all_dim", "beta_fast"] {
        for value in ["nan", "inf"] {
            assert_names(&refusal(1, &[&yarn(&format!("{number}={value}"))]), &[number]);
        }
    }
}

#[test]
fn a_file_that_is_not_toml_is_refused_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.toml");
    std::fs::write(&path, "[train]\nsteps = 5\nseed = = 6\n").unwrap();
    let message = Config::load(Some(&path), &[]).unwrap_err().to_string();
    assert_names(&message, &["bad.toml:3:"]);
    assert!(!message.contains('\n'));
    let message = Config::load(Some(&dir.path().join("absent.toml")), &[]).unwrap_err().to_string();
    assert_names(&message, &["absent.toml"]);
}

#[test]
fn b210_expert_counts_that_do_not_fit_are_refused_before_anything_runs() {
    let experts = |n: usize| format!("model.n_routed_experts={n}");
    let one_group = ["model.n_group=1", "model.topk_group=1"];
    let with = |first: &[&str], ranks| refusal(ranks, &[first, &one_group[..]].concat());
    assert_names(&with(&[&experts(10)], 4), &["n_routed_experts", "10", "4 ranks"]);
    assert_names(&with(&[&experts(8)], 16), &["n_routed_experts", "8", "16 ranks"]);
    assert_names(&with(&[&experts(0)], 1), &["n_routed_experts", "0"]);
    assert_names(&with(&["model.num_experts_per_tok=0"], 1), &["num_experts_per_tok", "0"]);
    assert_names(&with(&[&experts(4), "model.num_experts_per_tok=5"], 1), &["num_experts_per_tok is 5", "is 4"]);
    let groups = ["model.n_group=4", "model.topk_group=1", "model.num_experts_per_tok=5"];
    assert_names(&refusal(1, &groups), &["num_experts_per_tok is 5", "topk_group 1 of 4", "4 eligible"]);
    assert_names(&refusal(1, &["model.n_group=3"]), &["n_group is 3", "16"]);
    assert_names(&refusal(1, &["model.topk_group=5"]), &["topk_group is 5", "n_group is 4"]);
}

#[test]
fn b213_a_width_that_is_no_multiple_of_the_quantization_block_is_refused() {
    let recipe = "train.recipe=mxfp8";
    load(&[recipe, "model.moe_intermediate_size=192"]).unwrap().check(1, 1).unwrap();
    assert_names(&refusal(1, &[recipe, "model.moe_intermediate_size=48"]), &["moe_intermediate_size is 48", "32"]);
    assert_names(&refusal(1, &[recipe, "model.hidden_size=136"]), &["hidden_size is 136", "32"]);
}

#[test]
fn batches_that_cannot_be_divided_are_refused() {
    assert_names(&refusal(1, &["train.micro_batch_size=12"]), &["micro_batch_size is 12", "batch_size, 16"]);
    assert_names(&refusal(1, &["train.grad_shards=3"]), &["grad_shards is 3", "power of two"]);
    assert_names(&refusal(1, &["train.grad_shards=32"]), &["grad_shards is 32", "16"]);
    assert_names(&refusal(2, &["train.grad_shards=1"]), &["grad_shards is 1", "2 ranks"]);
    assert_names(&refusal(1, &["train.sequence_length=129"]), &["sequence_length is 129", "is 128"]);
    assert_names(&refusal(1, &["moe.chunks=3"]), &["moe.chunks is 3", "512 tokens"]);
    assert_names(&refusal(1, &["model.vocab_size=256"]), &["vocab_size is 256", "257"]);
    assert_names(&refusal(1, &["train.batch_size=0"]), &["train.batch_size is 0"]);
    assert_names(&refusal(1, &["train.beta2=1.0"]), &["train.beta2 is 1"]);
    assert_names(&refusal(1, &["train.learning_rate=nan"]), &["train.learning_rate is NaN"]);
}

#[test]
fn ranks_that_cannot_share_experts_are_refused() {
    let check = |ranks, expert_ranks, set: &[&str]| load(set).unwrap().check(ranks, expert_ranks);
    check(4, 2, &["moe.expert_shards=2"]).unwrap();
    check(4, 1, &["moe.expert_shards=4"]).unwrap();
    // More replicas than experts that a rank could have.
    check(4, 1, &["moe.expert_shards=4", "model.n_routed_experts=4", "model.n_group=2"]).unwrap();
    let refuse = |ranks, expert_ranks, set: &[&str]| check(ranks, expert_ranks, set).unwrap_err().to_string();
    assert_eq!(refuse(4, 3, &[]), "config: --expert-parallel is 3, which does not divide --ranks, 4");
    assert_eq!(refuse(4, 0, &[]), "config: --expert-parallel is 0, which does not divide --ranks, 4");
    assert_eq!(refuse(1, 1, &["moe.expert_shards=3"]), "config: moe.expert_shards is 3, expected a power of two");
    assert_eq!(refuse(1, 1, &["moe.expert_shards=0"]), "config: moe.expert_shards is 0, expected a power of two");
    let message = refuse(1, 1, &["moe.expert_shards=8"]);
    assert_eq!(message, "config: moe.expert_shards is 8, which does not divide train.grad_shards, 4");
    assert_names(&refuse(4, 2, &[]), &["moe.expert_shards is 1", "2 replicas", "--ranks 4, --expert-parallel 2"]);
}

#[test]
fn a_run_may_go_on_only_with_what_set_its_bits() {
    let before = load(&[]).unwrap();
    let longer = load(&["train.steps=999", "activations.qkv=offload", "train.keep_checkpoints=9"]).unwrap();
    before.check_continues_as(&longer).unwrap();
    let other = load(&["train.grad_shards=2"]).unwrap();
    let message = before.check_continues_as(&other).unwrap_err().to_string();
    assert_names(&message, &["train.grad_shards is 2", "checkpoint was made with 4"]);
    let other = load(&["moe.expert_shards=2"]).unwrap();
    let message = before.check_continues_as(&other).unwrap_err().to_string();
    assert_names(&message, &["moe.expert_shards is 2", "checkpoint was made with 1"]);
    let yarn = ["model.rope_scaling.type=yarn", "model.rope_scaling.factor=2.0"];
    let yarn = load(&[yarn[0], yarn[1], "model.rope_scaling.original_max_position_embeddings=64"]).unwrap();
    assert_names(&before.check_continues_as(&yarn).unwrap_err().to_string(), &["model.rope_scaling"]);
    assert_names(&yarn.check_continues_as(&before).unwrap_err().to_string(), &["absent", "model.rope_scaling"]);
}

fn beta_fast(config: &Config) -> f64 {
    match &config.model {
        ModelConfig::DeepseekV3(DeepseekV3 { rope_scaling: Some(Scaling::Yarn(yarn)), .. }) => yarn.beta_fast,
        other => panic!("{other:?}"),
    }
}

const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/reference");

#[test]
fn a_hugging_face_configuration_is_read_and_written() {
    let model = ModelConfig::from_hf(format!("{REFERENCE}/deepseek_v3_a/config.json").as_ref()).unwrap();
    let ModelConfig::DeepseekV3(fields) = &model else { panic!("{model:?}") };
    assert_eq!((fields.n_routed_experts, fields.q_lora_rank, fields.rope_theta), (8, 24, 10000.0));
    assert_eq!((fields.routed_scaling_factor, fields.num_nextn_predict_layers), (2.5, 1));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let yarn = load(
        &["model.rope_scaling.type=yarn", "model.rope_scaling.factor=2.0"]
            .into_iter()
            .chain(["model.rope_scaling.original_max_position_embeddings=64"])
            .collect::<Vec<_>>(),
    )
    .unwrap()
    .model;
    for model in [model, yarn] {
        std::fs::write(&path, model.to_hf(&SpecialTokens::default())).unwrap();
        assert_eq!(ModelConfig::from_hf(&path).unwrap(), model);
    }
}

#[test]
fn an_architecture_that_is_not_supported_is_named() {
    let refuse = |path: &str| ModelConfig::from_hf(path.as_ref()).unwrap_err().to_string();
    assert_names(&refuse(&format!("{REFERENCE}/absent/config.json")), &["absent/config.json"]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let text = std::fs::read_to_string(format!("{REFERENCE}/deepseek_v3_a/config.json")).unwrap();
    for (from, to, words) in [
        ("\"model_type\": \"deepseek_v3\"", "\"model_type\": \"llama\"", ["llama", "deepseek_v3, qwen3_moe, mixtral"]),
        ("\"attention_bias\": false", "\"attention_bias\": true", ["attention_bias", "true"]),
        ("\"hidden_size\": 64,", "", ["hidden_size", "missing"]),
        ("\"rope_type\": \"default\"", "\"rope_type\": \"dynamic\"", ["rope_parameters", "dynamic"]),
        ("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 9", ["num_experts_per_tok", "9"]),
    ] {
        std::fs::write(&path, text.replace(from, to)).unwrap();
        assert_names(&refuse(path.to_str().unwrap()), &words);
    }
}
