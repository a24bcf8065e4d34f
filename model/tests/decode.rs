//! Generation with a cache against passes over whole sequences: the same bits.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dropless_core::host::{Host, HostOptions};
use dropless_core::ops::NONE;
use dropless_core::{Backend, DType};
use dropless_model::moe::Recipe;
use dropless_model::nn::{LinearRecipe, Tokens};
use dropless_model::{Inputs, Model, ModelConfig, Options};

const POSITIONS: usize = 160;

fn models() -> Vec<ModelConfig> {
    let common = r#""vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_experts_per_tok": 2, "rope_theta": 10000.0, "max_position_embeddings": 256, "initializer_range": 0.2"#;
    [
        r#""family": "deepseek_v3", "rms_norm_eps": 1e-6, "intermediate_size": 48, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "norm_topk_prob": true, "routed_scaling_factor": 2.5"#,
        r#""family": "qwen3_moe", "rms_norm_eps": 1e-6, "intermediate_size": 48, "moe_intermediate_size": 32,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "mlp_only_layers": [1]"#,
        r#""family": "mixtral", "rms_norm_eps": 1e-5, "intermediate_size": 32, "num_local_experts": 4"#,
    ]
    .map(|family| serde_json::from_str(&format!("{{{common}, {family}}}")).unwrap())
    .to_vec()
}

fn ids(sequence: u32, len: usize) -> Vec<u32> {
    (0..).map(|i: u32| (i * 29 + sequence * 13 + i * i * 5) % 64).take(len).collect()
}

/// Logits of every position of one sequence, in one pass.
fn whole(backend: &dyn Backend, model: &Model, ids: &[u32]) -> Vec<Vec<u32>> {
    let len = ids.len();
    let tokens = Tokens::new(backend, 1, len, 1).unwrap();
    let put = |values: &[u32]| backend.upload(DType::U32, &[len], values).unwrap();
    let positions: Vec<u32> = (0..).take(len).collect();
    let inputs = Inputs {
        ids: put(ids),
        targets: put(&vec![NONE; len]),
        positions: put(&positions),
        start: put(&vec![0; len]),
        scale: backend.upload(DType::F32, &[1], &[0.0f32]).unwrap(),
        next: None,
    };
    let logits = model.logits(backend, &tokens, &inputs).unwrap();
    (0..len).map(|row| backend.download(&logits.index(row).unwrap()).unwrap()).collect()
}

#[test]
fn a_cache_changes_no_bit_whatever_the_steps_and_the_other_sequences() {
    let host = Host::new(HostOptions::default()).unwrap();
    let backend: &dyn Backend = &host;
    let mut recipes = Recipe::ALL.map(|recipe| (recipe, LinearRecipe::Bf16)).to_vec();
    recipes.push((Recipe::Mxfp8, LinearRecipe::Fp8Block));
    for (config, (recipe, linear_recipe)) in
        models().into_iter().flat_map(|m| recipes.iter().map(move |&r| (m.clone(), r)))
    {
        let parts = config.architecture();
        let options = Options { recipe, linear_recipe, ..Options::default() };
        let tokens = Tokens::new(backend, 1, POSITIONS, 1).unwrap();
        let mut model = Model::new(backend, &parts, &options, &tokens).unwrap();
        model.initialise(backend, 3, parts.initializer_range).unwrap();
        // Over the edge of a tile of 128 keys, and below.
        let texts = [ids(1, 140), ids(2, 9)];
        let expected = texts.each_ref().map(|ids| whole(backend, &model, ids));
        // How many tokens of each sequence a pass brings.
        let passes = [[126, 5], [1, 1], [1, 0], [2, 1], [1, 1], [9, 1]];
        let mut cache = model.cache(backend, 2).unwrap();
        for counts in passes {
            let before = [cache.lengths()[0], cache.lengths()[1]];
            let new = [0, 1].map(|s| &texts[s][before[s]..before[s] + counts[s]]);
            let logits = model.decode(backend, &mut cache, &new).unwrap();
            for s in (0..2).filter(|&s| counts[s] > 0) {
                let found: Vec<u32> = backend.download(&logits.index(s).unwrap()).unwrap();
                let last = before[s] + counts[s] - 1;
                assert!(
                    found == expected[s][last],
                    "{} {recipe:?}, linear {linear_recipe:?}, sequence {s}, token {last}",
                    config.family()
                );
            }
        }
        assert_eq!(cache.lengths(), [140, 9]);
    }
}

#[test]
fn what_does_not_fit_the_cache_is_refused() {
    let host = Host::new(HostOptions::default()).unwrap();
    let backend: &dyn Backend = &host;
    let tokens = Tokens::new(backend, 1, 8, 1).unwrap();
    let mut model = Model::new(backend, &models()[2].architecture(), &Options::default(), &tokens).unwrap();
    model.initialise(backend, 3, 0.2).unwrap();
    let mut cache = model.cache(backend, 1).unwrap();
    let mut refuse = |new: &[&[u32]]| model.decode(backend, &mut cache, new).unwrap_err().to_string();
    assert_eq!(refuse(&[&[1; 9]]), "decode: new is 9, expected at most 8 tokens of a sequence");
    assert_eq!(refuse(&[&[1], &[2]]), "decode: new is 2, expected one for each of the 1 sequences");
    assert_eq!(refuse(&[&[]]), "decode: new is 0, expected at least one token");
}
