//! Configurations: defaults, overrides, and the one line that each mistake gets.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dropless::Config;
use dropless::config::{LinearRecipe, ModelConfig, Policy, Recipe};
use dropless_core::ops::Pairs;
use dropless_model::attention::AttentionConfig;
use dropless_model::families::DeepseekV3;
use dropless_model::hf::SpecialTokens;
use dropless_model::rope::Scaling;
use serde_json::{Map, Value, json};

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
        "train.linear_recipe=fp8-block",
        "activations.qkv=recompute",
        "data.train=[\"a/*.txt\"]",
        "model.rope_scaling.type=yarn",
        "model.rope_scaling.factor=4.0",
        "model.rope_scaling.original_max_position_embeddings=32",
    ])
    .unwrap();
    assert_eq!((config.train.seed, config.train.recipe), (7, Recipe::Mxfp8));
    assert_eq!(config.train.linear_recipe, LinearRecipe::Fp8Block);
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
    // Nothing is suggested for what looks like nothing.
    for key in ["train.zzz", "train.gpu", "wandb", "moe.quux"] {
        let message = refusal(1, &[&format!("{key}=2")]);
        assert_names(&message, &[&format!("unknown key {key}")]);
        assert!(!message.contains("did you mean"), "{message}");
    }
}

#[test]
fn a_weight_that_is_too_large_is_written_as_it_was_given() {
    let message = refusal(1, &["data.source=[{paths=[\"a\"], weight=1e308}]"]);
    assert_names(&message, &["data.source[0].weight is 1e308, expected more than 0 and at most 1000000"]);
    assert_names(&refusal(1, &["data.validation_fraction=1e308"]), &["data.validation_fraction is 1e308, expected"]);
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
fn a_recipe_of_linear_layers_is_refused_where_it_does_not_fit() {
    let recipe = "train.linear_recipe=mxfp8";
    assert_names(&refusal(1, &[recipe]), &["layers.0.self_attn.kv_b_proj.weight is [192, 48]", "linear_recipe", "32"]);
    let fits = [recipe, "model.kv_lora_rank=64", "model.qk_rope_head_dim=32"];
    load(&fits).unwrap().check(1, 1).unwrap();
    let dense = "model.intermediate_size=272";
    assert_names(&refusal(1, &[&fits[..], &[dense]].concat()), &["mlp.down_proj.weight is [128, 272]"]);
    let qwen = [recipe, "model.family=qwen3_moe", "model.head_dim=10"];
    assert_names(&refusal(1, &qwen), &["q_proj.weight + ", "k_proj.weight + ", "v_proj.weight is [80, 128]"]);
    // Blocks of FP8 may be partial.
    load(&["train.linear_recipe=fp8-block", dense]).unwrap().check(1, 1).unwrap();
    for linear in ["mxfp8", "fp8-block"] {
        let message = refusal(1, &["train.recipe=f32", &format!("train.linear_recipe={linear}")]);
        assert_names(&message, &["train.linear_recipe", "train.recipe is \"f32\""]);
    }
    load(&["train.recipe=f32"]).unwrap().check(1, 1).unwrap();
    assert_names(&refusal(1, &["train.linear_recipe=f32"]), &["train.linear_recipe", "f32", "bf16"]);
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
        (
            "\"model_type\": \"deepseek_v3\"",
            "\"model_type\": 3",
            ["model_type is 3", "deepseek_v3, qwen3_moe, mixtral"],
        ),
        ("\"attention_bias\": false", "\"attention_bias\": true", ["attention_bias", "true"]),
        ("\"hidden_size\": 64,", "", ["hidden_size", "missing"]),
        ("\"rope_type\": \"default\"", "\"rope_type\": \"dynamic\"", ["rope_parameters", "dynamic"]),
        ("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 9", ["num_experts_per_tok", "9"]),
    ] {
        std::fs::write(&path, text.replace(from, to)).unwrap();
        assert_names(&refuse(path.to_str().unwrap()), &words);
    }
}

/// A reference's `config.json` without its own word on rotary positions, and with these keys.
fn changed(reference: &str, changes: Value) -> dropless_model::Result<ModelConfig> {
    let text = std::fs::read_to_string(format!("{REFERENCE}/{reference}/config.json")).unwrap();
    let mut fields: Map<String, Value> = serde_json::from_str(&text).unwrap();
    fields.remove("rope_parameters");
    fields.extend(changes.as_object().unwrap().clone());
    read(&serde_json::to_string(&fields).unwrap())
}

fn read(text: &str) -> dropless_model::Result<ModelConfig> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    std::fs::write(&path, text).unwrap();
    ModelConfig::from_hf(&path)
}

/// `a` and `b` as one object.
fn and(a: &Value, b: Value) -> Value {
    let both = [a, &b].into_iter().flat_map(|value| value.as_object().unwrap().clone());
    Value::Object(both.collect())
}

fn rope_theta(model: &ModelConfig) -> f64 {
    match model {
        ModelConfig::DeepseekV3(model) => model.rope_theta,
        ModelConfig::Qwen3Moe(model) => model.rope_theta,
        ModelConfig::Mixtral(model) => model.rope_theta,
    }
}

fn rope_scaling(model: &ModelConfig) -> Option<&Scaling> {
    match model {
        ModelConfig::DeepseekV3(model) => model.rope_scaling.as_ref(),
        ModelConfig::Qwen3Moe(model) => model.rope_scaling.as_ref(),
        ModelConfig::Mixtral(model) => model.rope_scaling.as_ref(),
    }
}

const REFERENCES: [&str; 3] = ["deepseek_v3_a", "qwen3_moe_a", "mixtral_a"];

#[test]
fn every_spelling_of_rotary_positions_means_the_same() {
    let (theta, default) = (json!({"rope_theta": 5e4}), json!({"rope_type": "default"}));
    let factor = json!({"rope_type": "yarn", "factor": 4.0});
    let yarn = and(&factor, json!({"original_max_position_embeddings": 32}));
    let older = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    for reference in REFERENCES {
        let expected = changed(reference, json!({"rope_parameters": and(&yarn, theta.clone())})).unwrap();
        let Some(Scaling::Yarn(found)) = rope_scaling(&expected) else { panic!("{expected:?}") };
        assert_eq!((rope_theta(&expected), found.factor, found.original_max_position_embeddings), (5e4, 4.0, 32));
        assert_eq!((found.beta_fast, found.beta_slow, found.truncate), (32.0, 1.0, true));
        for spelling in [
            json!({"rope_parameters": yarn}),
            json!({"rope_parameters": and(&older, theta.clone())}),
            json!({"rope_parameters": and(&older, json!({"rope_type": "yarn"}))}),
            json!({"rope_parameters": and(&yarn, json!({"mscale": null, "beta_fast": null, "attention_factor": null}))}),
            json!({"rope_parameters": and(&yarn, json!({"partial_rotary_factor": 1.0, "truncate": true}))}),
            json!({"rope_scaling": yarn}),
            json!({"rope_scaling": older}),
            json!({"rope_scaling": older, "rope_parameters": and(&default, theta.clone())}),
            json!({"rope_scaling": older, "rope_parameters": and(&yarn, theta.clone())}),
            json!({"rope_scaling": {}, "rope_parameters": yarn}),
            json!({"rope_scaling": null, "rope_parameters": yarn}),
            json!({"rope_parameters": factor, "original_max_position_embeddings": 32}),
            json!({"rope_parameters": yarn, "original_max_position_embeddings": 32}),
            json!({"rope_parameters": factor, "max_position_embeddings": 32}),
            json!({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32, "factor": null}}),
        ] {
            let mut found = changed(reference, and(&theta, spelling.clone())).unwrap();
            if spelling.get("max_position_embeddings").is_some() {
                found = with_positions(found, 128);
            }
            assert_eq!(found, expected, "{reference}: {spelling}");
        }
        assert_round_trip(&expected);
    }
}

/// Rotary positions are written as they were read.
fn assert_round_trip(model: &ModelConfig) {
    let again = read(&model.to_hf(&SpecialTokens::default())).unwrap();
    assert_eq!((rope_theta(&again), rope_scaling(&again)), (rope_theta(model), rope_scaling(model)));
}

fn with_positions(mut model: ModelConfig, positions: usize) -> ModelConfig {
    match &mut model {
        ModelConfig::DeepseekV3(model) => model.max_position_embeddings = positions,
        ModelConfig::Qwen3Moe(model) => model.max_position_embeddings = positions,
        ModelConfig::Mixtral(model) => model.max_position_embeddings = positions,
    }
    model
}

#[test]
fn f09_every_field_of_rotary_positions_counts() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    let more = json!({"attention_factor": 50, "truncate": false, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7,
        "mscale_all_dim": 1.3});
    for reference in REFERENCES {
        let of =
            |more: Value| changed(reference, json!({"rope_theta": 1e4, "rope_parameters": and(&yarn, more)})).unwrap();
        let all = of(more.clone());
        let Some(Scaling::Yarn(found)) = rope_scaling(&all) else { panic!("{all:?}") };
        assert_eq!((found.attention_factor, found.truncate), (Some(50.0), false));
        assert_eq!((found.beta_fast, found.beta_slow), (16.0, 2.0));
        assert_eq!((found.mscale, found.mscale_all_dim), (Some(0.7), Some(1.3)));
        assert_round_trip(&all);
        // Other libraries take this null, alone of all, for another value than the default.
        let null = of(json!({"truncate": null}));
        assert!(matches!(rope_scaling(&null), Some(Scaling::Yarn(yarn)) if !yarn.truncate));
        let linear = changed(reference, json!({"rope_scaling": {"type": "linear", "factor": 3}})).unwrap();
        assert!(matches!(rope_scaling(&linear), Some(Scaling::Linear(linear)) if linear.factor == 3.0));
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4.0});
        let llama3 = changed(reference, json!({"rope_parameters": llama3})).unwrap();
        let Some(Scaling::Llama3(found)) = rope_scaling(&llama3) else { panic!("{llama3:?}") };
        assert_eq!((found.low_freq_factor, found.high_freq_factor), (1.0, 4.0));
        assert_eq!(found.original_max_position_embeddings, 128, "the longest position, where it is not said");
        assert_round_trip(&linear);
        assert_round_trip(&llama3);
    }
    let usual = REFERENCES.map(|reference| rope_theta(&changed(reference, json!({})).unwrap()));
    assert_eq!(usual, [1e4, 1e4, 1e6], "what the families take where a file says nothing");
}

#[test]
fn f09_a_field_of_rotary_positions_that_does_not_count_is_refused_by_name() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    let parameters = |more: Value| json!({"rope_parameters": and(&yarn, more)});
    for (changes, words) in [
        (parameters(json!({"short_factor": [1.0]})), &["rope_scaling", "short_factor"][..]),
        (parameters(json!({"low_freq_factor": 1.0})), &["rope_scaling", "low_freq_factor"]),
        (json!({"rope_parameters": and(&llama3, json!({"beta_fast": 32}))}), &["rope_scaling", "beta_fast"]),
        (json!({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}), &["rope_scaling", "mscale"]),
        (json!({"rope_scaling": {"type": "linear"}}), &["rope_scaling", "factor"]),
        (json!({"rope_scaling": {"type": "longrope", "factor": 2.0}}), &["rope_scaling", "longrope"]),
        (json!({"rope_parameters": {"rope_type": "default", "factor": 2.0}}), &["rope_parameters", "factor"]),
        (
            json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
            &["rope_parameters", "full_attention"],
        ),
        (json!({"rope_parameters": "yarn"}), &["rope_parameters", "yarn", "object"]),
        (parameters(json!({"partial_rotary_factor": 0.5})), &["partial_rotary_factor is 0.5 in rope_parameters"]),
        (json!({"partial_rotary_factor": 0.5}), &["partial_rotary_factor is 0.5"]),
        (parameters(json!({"type": "linear"})), &["rope_parameters", "rope_type \"yarn\"", "type \"linear\""]),
        (
            json!({"rope_parameters": yarn, "rope_scaling": {"type": "linear", "factor": 2.0}}),
            &["rope_parameters", "rope_scaling", "differ"],
        ),
        (json!({"rope_parameters": yarn, "rope_scaling": {"type": "default"}}), &["rope_parameters", "rope_scaling"]),
        (parameters(json!({"rope_theta": 1e5})), &["rope_theta is 10000.0 on its own", "100000.0 in rope_parameters"]),
        (
            json!({"rope_theta": null, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "rope_scaling": yarn}),
            &["rope_theta is 100000.0 in rope_parameters", "by default"],
        ),
        (
            and(&parameters(json!({})), json!({"original_max_position_embeddings": 64})),
            &["original_max_position_embeddings is 32 in rope_parameters", "64"],
        ),
        (parameters(json!({"factor": 0.5})), &["rope_scaling.factor is 0.5"]),
        (parameters(json!({"beta_slow": 64})), &["rope_scaling.beta_fast is 32", "beta_slow is 64"]),
        (parameters(json!({"mscale": "1"})), &["mscale"]),
    ] {
        for reference in REFERENCES {
            let message = match changed(reference, and(&json!({"rope_theta": 1e4}), changes.clone())) {
                Err(error) => error.to_string(),
                Ok(model) => panic!("{reference}: {changes} was read as {model:?}"),
            };
            assert!(!message.contains('\n'), "one line: {message}");
            assert_names(&message, words);
        }
    }
}

#[test]
fn an_absent_key_means_what_other_libraries_take() {
    let without = |reference: &str, key: &str, more: Value| {
        let text = std::fs::read_to_string(format!("{REFERENCE}/{reference}/config.json")).unwrap();
        let mut fields: Map<String, Value> = serde_json::from_str(&text).unwrap();
        fields.remove(key);
        fields.extend(more.as_object().unwrap().clone());
        read(&serde_json::to_string(&fields).unwrap()).unwrap()
    };
    let ModelConfig::DeepseekV3(model) = without("deepseek_v3_a", "q_lora_rank", json!({})) else { panic!() };
    assert_eq!(model.q_lora_rank, 1536);
    let ModelConfig::DeepseekV3(model) = without("deepseek_v3_a", "", json!({"q_lora_rank": null})) else { panic!() };
    assert_eq!(model.q_lora_rank, 0, "null is a plain projection");
    let ModelConfig::DeepseekV3(model) = without("deepseek_v3_a", "n_shared_experts", json!({})) else { panic!() };
    assert_eq!(model.n_shared_experts, 1);
    let heads = json!({"num_attention_heads": 16});
    let ModelConfig::Qwen3Moe(model) = without("qwen3_moe_a", "num_key_value_heads", heads.clone()) else { panic!() };
    assert_eq!(model.num_key_value_heads, Some(4));
    let ModelConfig::Mixtral(model) = without("mixtral_a", "num_key_value_heads", heads) else { panic!() };
    assert_eq!(model.num_key_value_heads, Some(8));
    let layers = json!({"num_hidden_layers": 1, "first_k_dense_replace": 3});
    let ModelConfig::DeepseekV3(model) = without("deepseek_v3_a", "", layers) else { panic!() };
    assert_eq!(model.first_k_dense_replace, 3, "all of them");
}

#[test]
fn f08_what_other_libraries_would_read_as_another_model_is_refused_when_a_run_starts() {
    assert_names(&refusal(1, &["model.scoring_func=softmax"]), &["scoring_func", "softmax", "sigmoid"]);
    let one_each = ["model.n_group=16", "model.topk_group=8"];
    assert_names(&refusal(1, &one_each), &["n_group is 16", "one expert in each", "two best"]);
    let one = ["model.n_routed_experts=1", "model.num_experts_per_tok=1", "model.n_group=1", "model.topk_group=1"];
    assert_names(&refusal(1, &one), &["n_group is 1", "one expert in each"]);
    for (reference, changes, words) in [
        ("deepseek_v3_a", json!({"scoring_func": "softmax"}), &["scoring_func", "softmax"][..]),
        ("deepseek_v3_a", json!({"n_group": 8}), &["n_group is 8"]),
        ("deepseek_v3_a", json!({"num_key_value_heads": 2}), &["num_key_value_heads is 2", "num_attention_heads is 4"]),
        ("deepseek_v3_a", json!({"topk_method": "greedy"}), &["topk_method", "greedy"]),
        ("deepseek_v3_a", json!({"moe_layer_freq": 2}), &["moe_layer_freq", "2"]),
        ("qwen3_moe_a", json!({"use_sliding_window": true}), &["use_sliding_window"]),
        ("qwen3_moe_a", json!({"attention_bias": true}), &["attention_bias"]),
        ("qwen3_moe_a", json!({"num_experts": 4}), &["num_experts", "4", "8"]),
        ("mixtral_a", json!({"sliding_window": 4096}), &["sliding_window", "4096"]),
        ("mixtral_a", json!({"hidden_act": "gelu"}), &["hidden_act", "gelu"]),
    ] {
        match changed(reference, changes.clone()) {
            Err(error) => assert_names(&error.to_string(), words),
            Ok(model) => panic!("{reference}: {changes} was read as {model:?}"),
        }
    }
}

#[test]
fn rotary_pairs_of_latent_attention_are_read_and_exported() {
    let pairs = |model: &ModelConfig| match model.architecture().attention {
        AttentionConfig::Mla(attention) => attention.pairs,
        AttentionConfig::Gqa(attention) => attention.pairs,
    };
    let exported = |model: &ModelConfig| -> Value {
        let fields: Value = serde_json::from_str(&model.to_hf(&SpecialTokens::default())).unwrap();
        fields["rope_interleave"].clone()
    };
    // What another library takes of a null is false; only an absent key is true.
    for (given, want) in [(json!(true), true), (json!(false), false), (Value::Null, false)] {
        let model = changed("deepseek_v3_a", json!({"rope_interleave": given})).unwrap();
        assert_eq!(pairs(&model), if want { Pairs::Neighbours } else { Pairs::Halves });
        assert_eq!(exported(&model), json!(want));
        assert_eq!(read(&model.to_hf(&SpecialTokens::default())).unwrap(), model);
    }
    let absent = read(&std::fs::read_to_string(format!("{REFERENCE}/deepseek_tied/config.json")).unwrap()).unwrap();
    assert_eq!((pairs(&absent), exported(&absent)), (Pairs::Neighbours, json!(true)));
    assert_names(
        &changed("deepseek_v3_a", json!({"rope_interleave": 1})).unwrap_err().to_string(),
        &["rope_interleave"],
    );

    let config = load(&["model.rope_interleave=false"]).unwrap();
    assert_eq!((pairs(&config.model), exported(&config.model)), (Pairs::Halves, json!(false)));
    assert_eq!(Config::from_toml(&config.to_toml(), "config.toml").unwrap(), config);
    assert_eq!(pairs(&load(&[]).unwrap().model), Pairs::Neighbours);
    for family in ["qwen3_moe", "mixtral"] {
        let family = format!("model.family={family}");
        assert_eq!(pairs(&load(&[&family]).unwrap().model), Pairs::Halves);
        assert_names(&refusal(1, &[&family, "model.rope_interleave=true"]), &["unknown key", "model.rope_interleave"]);
    }
}

#[test]
fn each_family_starts_from_its_own_defaults() {
    for family in ["deepseek_v3", "qwen3_moe", "mixtral"] {
        let config = load(&[&format!("model.family={family}")]).unwrap();
        assert_eq!(config.model.family(), family);
        for ranks in [1, 2, 4] {
            config.check(ranks, ranks).unwrap();
        }
        config.check_data().unwrap();
        let path = match family {
            "deepseek_v3" => "default.toml".to_owned(),
            other => format!("{other}.toml"),
        };
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs").join(path);
        assert_eq!(Config::load(Some(&path), &[]).unwrap(), config, "{}", path.display());
        assert_eq!(Config::from_toml(&config.to_toml(), "config.toml").unwrap(), config);
        assert_eq!(read(&config.model.to_hf(&SpecialTokens::default())).unwrap(), config.model);
    }
}

#[test]
fn a_key_that_a_family_does_not_have_is_refused_with_the_familys_name() {
    for (family, key) in [
        ("qwen3_moe", "kv_lora_rank=8"),
        ("qwen3_moe", "n_routed_experts=8"),
        ("qwen3_moe", "routed_scaling_factor=2.0"),
        ("mixtral", "norm_topk_prob=true"),
        ("mixtral", "moe_intermediate_size=64"),
        ("deepseek_v3", "num_key_value_heads=2"),
        ("deepseek_v3", "num_local_experts=8"),
    ] {
        let name = format!("model.{}", key.split_once('=').unwrap().0);
        let message = refusal(1, &[&format!("model.family={family}"), &format!("model.{key}")]);
        assert_names(&message, &["unknown key", &name, family]);
    }
    let unknown = refusal(1, &["model.family=llama"]);
    assert_names(&unknown, &["family is llama", "deepseek_v3, qwen3_moe, mixtral"]);
    assert_names(&refusal(1, &["model.family=3"]), &["family is 3", "deepseek_v3"]);
    let unbalanced = refusal(1, &["model.family=mixtral", "train.bias_update_rate=0.1"]);
    assert_names(&unbalanced, &["bias_update_rate", "mixtral", "aux_loss_coefficient"]);
}

#[test]
fn f14_one_value_in_a_set() {
    for set in [
        "train.steps=5\ntrain.seed=77",
        "train.steps=5\n[model]",
        "train.steps=5\nvalue=6",
        "data.train=a\nb",
        "train.steps=5\r\nx=1",
    ] {
        assert_names(&refusal(1, &[set]), &["expected one value"]);
    }
    let several = load(&["data.train=[\"a\",\n \"b\",\n]\n", "train.steps=5 # five"]).unwrap();
    assert_eq!((several.data.train, several.train.steps), (vec!["a".to_owned(), "b".to_owned()], 5));
}

/// On a thread with as much stack as the program's first one has.
#[test]
fn f14_tables_in_tables_without_end_are_refused() {
    let dots = "a.".repeat(100_000);
    let brackets = format!("train.steps={}{}", "[".repeat(100_000), "]".repeat(100_000));
    let refused = move || {
        assert_names(&refusal(1, &[&format!("{dots}b=1")]), &["100001 parts"]);
        for set in [format!("train={{{dots}b = 1}}"), brackets] {
            refusal(1, &[&set]);
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep.toml");
        for text in [format!("{dots}b = 1"), format!("[{dots}b]\n"), format!("a = {}1", "{a=".repeat(100_000))] {
            std::fs::write(&path, text).unwrap();
            let message = Config::load(Some(&path), &[]).unwrap_err().to_string();
            assert_names(&message, &["deep.toml:1"]);
        }
    };
    std::thread::Builder::new().stack_size(8 << 20).spawn(refused).unwrap().join().unwrap();
}

/// Every key that becomes an f32.
#[test]
fn f11_numbers_that_round_away_are_refused_with_the_nearest_usable_value() {
    for (set, words) in [
        ("train.beta2=0.99999999", &["train.beta2 is 0.99999999, which is 1 in f32", "usable value is 0.99999994"][..]),
        ("train.beta1=0.99999999", &["train.beta1 is 0.99999999", "usable value is 0.99999994"]),
        ("train.max_grad_norm=1e-50", &["train.max_grad_norm is 1e-50, which is 0 in f32", "value is 1.1754944e-38"]),
        ("train.eps=1e-50", &["train.eps is 1e-50", "more than 0", "value is 1.1754944e-38"]),
        ("train.learning_rate=1e-50", &["train.learning_rate is 1e-50"]),
        ("train.min_learning_rate=1e-50", &["train.min_learning_rate is 1e-50"]),
        ("train.weight_decay=1e-50", &["train.weight_decay is 1e-50"]),
        ("train.bias_update_rate=1e-50", &["train.bias_update_rate is 1e-50"]),
        // Divided among the sequences and the tokens of a step before they become f32.
        ("train.aux_loss_coefficient=2e-38", &["train.aux_loss_coefficient is 2e-38", "value is 1.880791e-37"]),
        ("train.mtp_loss_coefficient=2e-38", &["train.mtp_loss_coefficient is 2e-38"]),
        ("model.rms_norm_eps=1e-50", &["model.rms_norm_eps is 1e-50"]),
        ("model.rope_theta=1.0", &["model.rope_theta is 1.0", "value is 1.0000001"]),
        ("model.rope_theta=1.00000001", &["model.rope_theta is 1.00000001, which is 1 in f32"]),
        ("model.routed_scaling_factor=0.0", &["model.routed_scaling_factor is 0.0", "more than 0"]),
        ("model.initializer_range=1e-50", &["model.initializer_range is 1e-50"]),
        (
            "model.rope_scaling={type=\"yarn\", factor=2.0, original_max_position_embeddings=64, attention_factor=1e-50}",
            &["model.rope_scaling.attention_factor is 1e-50"],
        ),
    ] {
        assert_names(&refusal(1, &[set]), words);
    }
    let initial = load(&["model.initializer_range=0.0"]).unwrap().check_initial().unwrap_err().to_string();
    assert_names(&initial, &["model.initializer_range is 0.0", "more than 0"]);
    for zero in ["max_grad_norm", "beta1", "beta2", "weight_decay", "bias_update_rate", "aux_loss_coefficient"] {
        load(&[&format!("train.{zero}=0.0")]).unwrap().check(1, 1).unwrap();
    }
}

#[test]
fn f19_names_and_values_in_messages_are_escaped() {
    assert_names(&refusal(1, &["train.recipe=\u{1b}[2Jred"]), &["\\u{1b}[2Jred"]);
    assert_names(&refusal(1, &["train.a\n\u{9b}b=1"]), &["train.a\\n\\u{9b}b"]);
    assert_names(&refusal(1, &["data.train=[\"a\\u202Eb\\u0007\"]", "train.steps=\"\\u0007\""]), &["\\u{7}"]);
    let error = Config::load(Some("no\nsuch\u{1b}file".as_ref()), &[]).unwrap_err().to_string();
    assert_names(&error, &["no\\nsuch\\u{1b}file"]);
}

#[test]
fn f25_a_router_that_learns_nothing_is_warned_of() {
    let warnings = |set: &[&str]| load(&[&["model.num_experts_per_tok=1"], set].concat()).unwrap().warnings();
    let [warning] = &warnings(&["train.aux_loss_coefficient=0.0"])[..] else { panic!("no warning") };
    assert_names(
        warning,
        &["warning: the gradient of every router is 0", "num_experts_per_tok is 1", "norm_topk_prob"],
    );
    assert_eq!(warnings(&["train.aux_loss_coefficient=1e-4"]), [""; 0]);
    assert_eq!(warnings(&["train.aux_loss_coefficient=0.0", "model.norm_topk_prob=false"]), [""; 0]);
    let mixtral = ["model.family=mixtral", "train.aux_loss_coefficient=0.0"];
    assert_names(&warnings(&mixtral)[0], &["this family divides"]);
    assert_eq!(load(&["train.aux_loss_coefficient=0.0"]).unwrap().warnings(), [""; 0]);
}

#[test]
fn f29_types_of_programs_are_in_no_message() {
    for (set, words) in [
        ("train.steps=often", "expected a whole number"),
        ("train.steps=-1", "expected a whole number, not negative"),
        ("train.steps=1.5", "number `1.5`, expected a whole number"),
        ("train.beta1=\"x\"", "expected a number"),
        ("data.train=5", "expected a list"),
        ("train=5", "expected a section of keys"),
        ("model.hidden_size=\"x\"", "expected a whole number"),
        ("model.norm_topk_prob=3", "expected true or false"),
        ("model.rope_theta=\"x\"", "expected a number"),
    ] {
        let message = refusal(1, &[set]);
        assert_names(&message, &[words]);
        for name in ["u64", "usize", "f64", "struct", "boolean", "floating"] {
            assert!(!message.contains(name), "{message}");
        }
    }
}

#[test]
fn a_model_without_experts_has_nothing_to_balance() {
    let dense = load(&["model.num_hidden_layers=2", "model.first_k_dense_replace=2"]).unwrap();
    assert!(dense.train.bias_update_rate > 0.0 && dense.model.architecture().moe().is_none());
    dense.check(1, 1).unwrap();
}

#[test]
fn deepseek_v3_has_two_names_for_experts_and_modules() {
    let other = json!({"num_local_experts": 8, "num_mtp_layers": 1, "n_routed_experts": null,
        "num_nextn_predict_layers": null});
    let rope = json!({"rope_theta": 1e4});
    let expected = changed("deepseek_v3_a", rope.clone()).unwrap();
    assert_eq!(changed("deepseek_v3_a", and(&rope, other)).unwrap(), expected);
    let both = changed("deepseek_v3_a", json!({"num_local_experts": 4})).unwrap_err().to_string();
    assert_names(&both, &["n_routed_experts is 4, but 8 in another spelling"]);
}
