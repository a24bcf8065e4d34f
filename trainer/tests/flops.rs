//! The arithmetic of a model, counted by hand.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dropless::Config;

fn of(set: &[&str]) -> f64 {
    let config = Config::load(None, &set.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()).unwrap();
    config.model.architecture().flops_per_token(config.train.sequence_length as f64 / 2.0)
}

#[test]
fn latent_attention_by_hand() {
    // Query 128 * 128, latent 128 * 64, keys and values 48 * 192, output 128 * 128.
    let attention = 16384 + 8192 + 9216 + 16384;
    let dense = 3 * 128 * 256;
    let sparse = 128 * 16 + 3 * 128 * 64 * 3;
    let products = 4 * attention + dense + 3 * sparse + 288 * 128;
    assert_eq!(of(&[]), f64::from(6 * products + 3 * 4 * 4 * 64 * 128));
}

#[test]
fn grouped_query_attention_by_hand() {
    // Four query heads and two of keys and values, 32 elements each; the output matrix.
    let attention = 128 * 32 * (4 + 2 + 2) + 128 * 128;
    let sparse = 128 * 16 + 3 * 128 * 64 * 2;
    let products = 4 * (attention + sparse) + 288 * 128;
    assert_eq!(of(&["model.family=qwen3_moe"]), f64::from(6 * products + 3 * 4 * 4 * 64 * 128));
    let dense = 3 * 128 * 256 - sparse;
    assert_eq!(
        of(&["model.family=qwen3_moe", "model.mlp_only_layers=[2]"]),
        of(&["model.family=qwen3_moe"]) + f64::from(6 * dense)
    );
    let products = 4 * (attention + 128 * 8 + 3 * 128 * 128 * 2) + 288 * 128;
    assert_eq!(of(&["model.family=mixtral"]), f64::from(6 * products + 3 * 4 * 4 * 64 * 128));
}

#[test]
fn every_part_counts() {
    let base = of(&[]);
    // A low-rank query of rank 64 is as large as the plain one here; 32 saves 6 * 4 * 8192.
    assert_eq!(of(&["model.q_lora_rank=64"]), base);
    assert_eq!(of(&["model.q_lora_rank=32"]), base - 196_608.0);
    // One more expert a token in each of three layers.
    assert_eq!(of(&["model.num_experts_per_tok=3"]), base + 6.0 * 3.0 * 24576.0);
    // A module: a projection of 2 * 128 * 128, a sparse layer and the output matrix.
    let module = 6.0 * (32768.0 + 50176.0 + 75776.0 + 36864.0) + 3.0 * 4.0 * 64.0 * 128.0;
    assert_eq!(of(&["model.num_nextn_predict_layers=1"]), base + module);
    assert_eq!(of(&["train.sequence_length=64"]), base - 3.0 * 4.0 * 4.0 * 64.0 * 64.0);
}
