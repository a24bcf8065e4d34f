//! Linear layers under their recipes, as an MLP has them: every shard stands alone, and values stay near those of bf16.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dropless_core::Backend;
use dropless_core::DType;
use dropless_core::host::{Host, HostOptions};
use dropless_model::nn::{Linear, LinearRecipe, Mlp, MlpPolicy, MlpSaved, Tokens, Weight};
use dropless_tests::moe::{distance, get, put, random, scaled, zeros};

/// Whole blocks of no format, and partial ones of FP8 blocks along every extent.
const SHARD: usize = 40;
const SHARDS: usize = 3;
const H: usize = 160;
const I: usize = 96;

/// Result, gradient of the input, and gradients of the weights, shard after shard.
struct Passed {
    y: Vec<f32>,
    dx: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

/// An MLP on the tokens of some shards, forward and backward.
fn pass(b: &dyn Backend, recipe: LinearRecipe, first: usize, shards: usize) -> Passed {
    let tokens = Tokens::new(b, shards, SHARD, shards).unwrap();
    let linear = |name: u32, n: usize, k: usize| {
        let value = put(b, DType::Bf16, &[1, n, k], &scaled(random(name, n * k), 0.2));
        Linear::new(Weight { value, grad: Some(zeros(b, &[shards, n, k])) }, recipe)
    };
    let rows = |name: u32| {
        let all = random(name, SHARDS * SHARD * H);
        // Each shard has a size of its own, which a block that spans two of them would show.
        let sized: Vec<f32> = all.iter().enumerate().map(|(at, v)| v * [1.0, 0.3, 20.0][at / (SHARD * H)]).collect();
        put(b, DType::Bf16, &[shards * SHARD, H], &sized[first * SHARD * H..(first + shards) * SHARD * H])
    };
    let mut mlp = Mlp { gate_up: linear(1, 2 * I, H), down: linear(2, H, I) };
    mlp.prepare(b).unwrap();
    let (x, dy, mut saved) = (rows(3), rows(4), MlpSaved::default());
    let y = mlp.forward(b, &tokens, &x, MlpPolicy::default(), &mut saved).unwrap();
    let dx = mlp.backward(b, &tokens, &x, &dy, saved).unwrap();
    let grad = |linear: &Linear| get(b, linear.weight.grad().unwrap());
    Passed { y: get(b, &y), dx: get(b, &dx), gate_up: grad(&mlp.gate_up), down: grad(&mlp.down) }
}

fn parts(passed: &Passed) -> [(&'static str, &[f32]); 4] {
    [("y", &passed.y), ("dx", &passed.dx), ("gate_up", &passed.gate_up), ("down", &passed.down)]
}

#[test]
fn a_shard_has_the_bits_that_it_has_alone() {
    let host = Host::new(HostOptions::default()).unwrap();
    for recipe in LinearRecipe::ALL {
        let together = pass(&host, recipe, 0, SHARDS);
        for shard in 0..SHARDS {
            let alone = pass(&host, recipe, shard, 1);
            for ((name, all), (_, one)) in parts(&together).into_iter().zip(parts(&alone)) {
                let part = &all[shard * one.len()..(shard + 1) * one.len()];
                let same = part.iter().zip(one).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same && one.iter().any(|v| *v != 0.0), "{recipe:?} {name}, shard {shard}");
            }
        }
    }
}

/// An e4m3 element is off by at most 2^-4 of itself, and errors of both factors add.
const E4M3_BOUND: f64 = 0.13;

#[test]
fn quantized_linear_layers_stay_near_those_of_bf16() {
    let host = Host::new(HostOptions::default()).unwrap();
    let exact = pass(&host, LinearRecipe::Bf16, 0, SHARDS);
    for recipe in [LinearRecipe::Mxfp8, LinearRecipe::Fp8Block] {
        let found = pass(&host, recipe, 0, SHARDS);
        for ((name, a), (_, b)) in parts(&found).into_iter().zip(parts(&exact)) {
            let wide: Vec<f64> = b.iter().map(|v| f64::from(*v)).collect();
            let d = distance(a, &wide);
            println!("{recipe:?} {name}: {d:e}");
            assert!(d < E4M3_BOUND, "{recipe:?} {name}: {d:e}");
            // Rounding to bf16 alone is smaller by far.
            assert!(d > 0.005, "{recipe:?} {name}: {d:e}, so nothing is quantized");
        }
    }
}

#[test]
fn a_weight_that_was_not_prepared_is_refused() {
    let host = Host::new(HostOptions::default()).unwrap();
    let b: &dyn Backend = &host;
    let linear = |n: usize, k: usize| {
        Linear::new(Weight::frozen(put(b, DType::Bf16, &[1, n, k], &random(1, n * k))), LinearRecipe::Fp8Block)
    };
    let mlp = Mlp { gate_up: linear(2 * I, H), down: linear(H, I) };
    let tokens = Tokens::new(b, 1, SHARD, 1).unwrap();
    let x = put(b, DType::Bf16, &[SHARD, H], &random(2, SHARD * H));
    let error = mlp.forward(b, &tokens, &x, MlpPolicy::default(), &mut MlpSaved::default()).unwrap_err().to_string();
    assert!(error.starts_with("grouped_gemm: b is ") && error.contains("expected the format of a"), "{error}");
}
