//! Runs whose digest must be the same: whatever the ranks, threads, vector instructions and activation policies, and
//! however often they were killed.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use dropless::checkpoint::newest;
use dropless::config::Config;
use dropless::options::{BackendKind, TrainOptions};
use dropless::train;
use dropless::{Error, Result};
use dropless_core::fallback::Fallback;
use dropless_core::host::{Host, HostOptions, Simd};
use dropless_core::lockstep::Lockstep;
use dropless_core::{Backend, Error as CoreError};
use dropless_tests::metered::Metered;
use dropless_tests::require::Need;
use dropless_tests::toy::Toy;

/// A small model with everything in it: groups, a shared expert, a multi-token-prediction module, low-rank queries, two
/// micro-batches.
const SMALL: &[&str] = &[
    "model.hidden_size=64",
    "model.intermediate_size=64",
    "model.moe_intermediate_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.q_lora_rank=32",
    "model.kv_lora_rank=32",
    "model.n_routed_experts=8",
    "model.num_nextn_predict_layers=1",
];

/// Small models of the other families: shared keys and values, norms of heads, a dense layer among the sparse ones, tied
/// and separate output matrices, scaled rotary positions.
const OTHERS: [&[&str]; 2] = [
    &[
        "model.family=\"qwen3_moe\"",
        "model.hidden_size=64",
        "model.intermediate_size=64",
        "model.moe_intermediate_size=32",
        "model.num_hidden_layers=3",
        "model.mlp_only_layers=[1]",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.head_dim=24",
        "model.num_experts=8",
        "model.tie_word_embeddings=true",
        "model.rope_scaling={type=\"yarn\", factor=4.0, original_max_position_embeddings=16}",
    ],
    &[
        "model.family=\"mixtral\"",
        "model.hidden_size=64",
        "model.intermediate_size=96",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=1",
        "model.head_dim=16",
        "model.num_local_experts=4",
    ],
];

/// Two micro-batches, four shards.
const RUN: &[&str] = &[
    "train.sequence_length=32",
    "train.batch_size=8",
    "train.micro_batch_size=4",
    "train.grad_shards=4",
    "train.warmup_steps=5",
    "train.eval_batches=1",
    "train.eval_interval=0",
    "data.validation_fraction=0.01",
    "train.steps=20",
];

fn config(more: &[&str]) -> Config {
    of(SMALL, more)
}

fn of(model: &[&str], more: &[&str]) -> Config {
    let all: Vec<String> = model.iter().chain(RUN).chain(more).map(|s| (*s).to_owned()).collect();
    Config::load(None, &all).unwrap()
}

fn options(out: &Path) -> TrainOptions {
    TrainOptions { out: out.to_path_buf(), threads: 2, ..TrainOptions::default() }
}

fn digest(config: &Config, change: impl FnOnce(&mut TrainOptions)) -> String {
    let out = tempfile::tempdir().unwrap();
    let mut options = options(out.path());
    change(&mut options);
    train::run(config, &options).unwrap().unwrap().digest
}

/// The first steps of the default job. Where a digest changes, some bit of some result did: that is a change of the
/// contract, and stands in CHANGELOG.md under "Numerics".
#[test]
fn the_default_job_has_the_digests_that_are_written_down() {
    const DIGESTS: [(&str, &str); 4] = [
        ("f32", "23d2f3e872feb101c1f6fa5610e892ac"),
        ("bf16", "d6159c1074d32561633c756eeea35f53"),
        ("mxfp8", "fb3f7958b9f405b52f4b67e2470b3c1f"),
        ("fp8-block", "0fb64dee3c33f336ab3770e9bf48360c"),
    ];
    let found = DIGESTS.map(|(recipe, _)| {
        let config = Config::load(None, &[format!("train.recipe=\"{recipe}\"")]).unwrap();
        (recipe, train::steps_in_memory(&config, &TrainOptions::default(), 2).unwrap().unwrap())
    });
    assert_eq!(found.each_ref().map(|(recipe, digest)| (*recipe, digest.as_str())), DIGESTS);
}

#[test]
fn b124_b154_ranks_and_threads_do_not_matter() {
    for recipe in ["f32", "bf16", "mxfp8", "fp8-block"] {
        let config = config(&[&format!("train.recipe=\"{recipe}\"")]);
        let expected = digest(&config, |_| {});
        for ranks in [2, 4] {
            assert_eq!(digest(&config, |o| o.ranks = ranks), expected, "{recipe}, {ranks} ranks");
        }
        assert_eq!(digest(&config, |o| o.threads = 1), expected, "{recipe}, 1 thread");
    }
}

/// Extents of [`SMALL`] whose linear layers are multiples of every block.
const WHOLE_BLOCKS: &str = "model.qk_rope_head_dim=32";

/// A shard has 32 tokens, so a block of FP8 that spanned two shards would have other elements on other ranks.
#[test]
fn quantized_linear_layers_depend_on_no_ranks_threads_policies_or_stops() {
    for model in [SMALL, OTHERS[0]] {
        let mut seen = Vec::new();
        for (linear, recipe) in
            [("bf16", "bf16"), ("mxfp8", "fp8-block"), ("fp8-block", "mxfp8"), ("fp8-block", "bf16")]
        {
            let recipes = [format!("train.linear_recipe=\"{linear}\""), format!("train.recipe=\"{recipe}\"")];
            let run = ["train.steps=4", "train.checkpoint_interval=2", "train.keep_checkpoints=0"];
            let set: Vec<&str> = recipes.iter().map(String::as_str).chain(run).collect();
            let set = if model == SMALL { [&set[..], &[WHOLE_BLOCKS]].concat() } else { set };
            let config = of(model, &set);
            let what = format!("{model:?}, linear {linear}, experts {recipe}");
            let expected = digest(&config, |o| o.threads = 1);
            for ranks in [2, 4] {
                assert_eq!(digest(&config, |o| o.ranks = ranks), expected, "{what}, {ranks} ranks");
            }
            let out = tempfile::tempdir().unwrap();
            train::run(&config, &TrainOptions { ranks: 2, ..options(out.path()) }).unwrap();
            std::fs::remove_dir_all(out.path().join("checkpoints/step-000004")).unwrap();
            let rest = TrainOptions { resume: true, ..options(out.path()) };
            assert_eq!(train::run(&config, &rest).unwrap().unwrap().digest, expected, "{what}, resumed");
            let all = ["attention_input", "qkv", "attention_output", "mlp_input", "gate_up", "expert_hidden"];
            let dropped = all.map(|class| format!("activations.{class}=\"recompute\""));
            let set: Vec<&str> = set.iter().copied().chain(dropped.iter().map(String::as_str)).collect();
            assert_eq!(digest(&of(model, &set), |_| {}), expected, "{what}, recomputed");
            assert!(!seen.contains(&expected), "{what}: the recipe changes nothing");
            seen.push(expected);
        }
    }
}

#[test]
fn the_other_families_agree_on_any_ranks_and_after_a_stop() {
    for model in OTHERS {
        for recipe in ["f32", "bf16", "mxfp8", "fp8-block"] {
            let recipe = format!("train.recipe=\"{recipe}\"");
            let set = [&recipe, "train.steps=4", "train.checkpoint_interval=2", "train.keep_checkpoints=0"];
            let config = of(model, &set);
            let expected = digest(&config, |_| {});
            for ranks in [2, 4] {
                assert_eq!(digest(&config, |o| o.ranks = ranks), expected, "{model:?}, {recipe}, {ranks} ranks");
            }
            let out = tempfile::tempdir().unwrap();
            train::run(&config, &TrainOptions { ranks: 2, ..options(out.path()) }).unwrap();
            std::fs::remove_dir_all(out.path().join("checkpoints/step-000004")).unwrap();
            let rest = TrainOptions { resume: true, ..options(out.path()) };
            let digest = train::run(&config, &rest).unwrap().unwrap().digest;
            assert_eq!(digest, expected, "{model:?}, {recipe}, resumed");
        }
        let all = ["attention_input", "qkv", "attention_output", "mlp_input", "dispatched", "gate_up", "expert_hidden"];
        let expected = digest(&of(model, &["train.steps=2"]), |_| {});
        for policy in ["offload", "recompute"] {
            let mut set: Vec<String> = all.iter().map(|class| format!("activations.{class}=\"{policy}\"")).collect();
            set.push("train.steps=2".into());
            let set: Vec<&str> = set.iter().map(String::as_str).collect();
            assert_eq!(digest(&of(model, &set), |_| {}), expected, "{model:?}, {policy}");
        }
    }
}

#[test]
fn every_level_of_instructions_has_the_digest_of_the_plain_code() {
    for recipe in ["f32", "bf16", "mxfp8", "fp8-block"] {
        let config = config(&[&format!("train.recipe=\"{recipe}\""), "train.steps=3"]);
        let expected = digest(&config, |o| o.simd = Some(Simd::Plain));
        for simd in Simd::ALL.into_iter().filter(|s| s.available()) {
            assert_eq!(digest(&config, |o| o.simd = Some(simd)), expected, "{recipe}, {simd:?}");
        }
    }
}

#[test]
fn policies_do_not_matter() {
    const CLASSES: [&str; 7] =
        ["attention_input", "qkv", "attention_output", "mlp_input", "dispatched", "gate_up", "expert_hidden"];
    for recipe in ["bf16", "mxfp8"] {
        let recipe = format!("train.recipe=\"{recipe}\"");
        let expected = digest(&config(&[&recipe]), |_| {});
        for policy in ["offload", "recompute"] {
            let set = CLASSES.map(|class| format!("activations.{class}=\"{policy}\""));
            let all: Vec<&str> = set.iter().map(String::as_str).chain([recipe.as_str()]).collect();
            assert_eq!(digest(&config(&all), |_| {}), expected, "{policy}");
            assert_eq!(digest(&config(&all), |o| o.ranks = 2), expected, "{policy}, 2 ranks");
        }
    }
}

#[test]
fn chunks_are_part_of_the_numbers_but_not_of_the_ranks() {
    let config = config(&["moe.chunks=2", "train.steps=6"]);
    let expected = digest(&config, |_| {});
    for ranks in [2, 4] {
        assert_eq!(digest(&config, |o| o.ranks = ranks), expected, "{ranks} ranks");
    }
}

/// Every way of dividing four expert shards: ranks, and how many of them share the experts.
const LAYOUTS: [(usize, usize); 6] = [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (4, 1)];

fn in_groups((ranks, expert_ranks): (usize, usize), options: TrainOptions) -> TrainOptions {
    TrainOptions { ranks, expert_parallel: Some(expert_ranks), ..options }
}

#[test]
fn replicas_of_the_experts_do_not_matter_but_expert_shards_do() {
    for (recipe, chunks) in [("bf16", 1), ("mxfp8", 1), ("bf16", 2)] {
        let set = [format!("train.recipe=\"{recipe}\""), format!("moe.chunks={chunks}"), "train.steps=6".into()];
        let of = |expert_shards: usize, layout| {
            let shards = format!("moe.expert_shards={expert_shards}");
            let all: Vec<&str> = set.iter().map(String::as_str).chain([shards.as_str()]).collect();
            digest(&config(&all), |o| *o = in_groups(layout, o.clone()))
        };
        let expected = of(4, (1, 1));
        for layout in LAYOUTS {
            assert_eq!(of(4, layout), expected, "{recipe}, {chunks} chunks, {layout:?}");
        }
        let halves = of(2, (1, 1));
        assert_eq!(of(2, (4, 2)), halves, "{recipe}, {chunks} chunks");
        let all = [of(1, (4, 4)), halves, expected];
        assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2], "{recipe}, {chunks} chunks: {all:?}");
    }
}

#[test]
fn b193_a_checkpoint_goes_on_with_other_replicas_of_the_experts() {
    let config =
        config(&["moe.expert_shards=4", "train.steps=8", "train.checkpoint_interval=4", "train.keep_checkpoints=0"]);
    let expected = digest(&config, |_| {});
    for (first, rest) in [((4, 2), (1, 1)), ((4, 1), (4, 2)), ((2, 2), (4, 1)), ((1, 1), (4, 2))] {
        let out = tempfile::tempdir().unwrap();
        train::run(&config, &in_groups(first, options(out.path()))).unwrap();
        std::fs::remove_dir_all(out.path().join("checkpoints/step-000008")).unwrap();
        let rest = in_groups(rest, TrainOptions { resume: true, ..options(out.path()) });
        assert_eq!(train::run(&config, &rest).unwrap().unwrap().digest, expected, "{first:?}, {rest:?}");
    }
}

#[test]
fn b193_a_checkpoint_of_two_ranks_goes_on_with_one_two_and_four() {
    let expected = digest(&config(&[]), |_| {});
    for ranks in [1, 2, 4] {
        let out = tempfile::tempdir().unwrap();
        let first = TrainOptions { ranks: 2, ..options(out.path()) };
        let stopped = config(&["train.checkpoint_interval=10", "train.keep_checkpoints=0"]);
        train::run(&stopped, &first).unwrap();
        // Go back to the middle.
        std::fs::remove_dir_all(out.path().join("checkpoints/step-000020")).unwrap();
        let rest = TrainOptions { ranks, resume: true, ..options(out.path()) };
        let summary = train::run(&stopped, &rest).unwrap().unwrap();
        assert_eq!((summary.steps, summary.digest), (20, expected.clone()), "{ranks} ranks");
    }
}

/// The files of every checkpoint in `out`, by their paths there.
fn files(out: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = |dir: &Path| std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let paths = entries(&out.join("checkpoints")).iter().flat_map(|checkpoint| entries(checkpoint)).collect::<Vec<_>>();
    paths.iter().map(|path| (path.strip_prefix(out).unwrap().to_owned(), std::fs::read(path).unwrap())).collect()
}

/// Trains with each rank on its own, as in processes of their own: they share an exchange, and files.
fn apart(config: &Config, of_rank: impl Fn(usize) -> (Config, TrainOptions) + Sync) -> Vec<Result<Option<String>>> {
    let ranks = of_rank(0).1.open_ranks(config.train.numerics.into()).unwrap();
    std::thread::scope(|scope| {
        let start = |rank: Box<dyn Backend>| {
            let (config, options) = of_rank(rank.caps().rank);
            scope.spawn(move || Ok(train::run_on(vec![rank], &config, &options)?.map(|summary| summary.digest)))
        };
        let threads: Vec<_> = ranks.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn ranks_of_different_processes_leave_the_same_files() {
    let config = config(&["train.steps=4", "train.checkpoint_interval=2", "train.keep_checkpoints=0"]);
    let (together, separate) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let expected = train::run(&config, &TrainOptions { ranks: 4, ..options(together.path()) }).unwrap().unwrap().digest;
    // Only the first rank's directory counts, and it is only there that the place to go on is looked for.
    let of_rank = |rank: usize| {
        let out = if rank == 0 { separate.path().to_owned() } else { PathBuf::from("/nowhere") };
        (config.clone(), TrainOptions { ranks: 4, resume: out.join("checkpoints").exists(), ..options(&out) })
    };
    for _ in 0..2 {
        let digests: Vec<_> = apart(&config, of_rank).into_iter().map(|result| result.unwrap()).collect();
        assert_eq!(digests, [Some(expected.clone()), None, None, None]);
        assert_eq!(files(separate.path()), files(together.path()));
        // The second time they go on from the middle.
        std::fs::remove_dir_all(separate.path().join("checkpoints/step-000004")).unwrap();
    }
    let metrics = std::fs::read_to_string(separate.path().join("metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().filter(|line| line.contains("\"loss\"")).count(), 4);
}

/// A [`Metered`] rank holds that it begins no exchange while it is busy by itself.
#[test]
fn ranks_are_back_for_every_exchange_of_a_run() {
    let config = config(&["train.steps=4", "train.checkpoint_interval=2", "train.keep_checkpoints=0"]);
    let (out, expected) = (tempfile::tempdir().unwrap(), digest(&config, |_| {}));
    for _ in 0..2 {
        let hosts = Host::ranks(2, HostOptions { threads: 1, ..HostOptions::default() }).unwrap();
        let ranks = hosts.into_iter().map(|host| Box::new(Metered::new(host)) as Box<dyn Backend>).collect();
        let options = TrainOptions { resume: out.path().join("checkpoints").exists(), ..options(out.path()) };
        assert_eq!(train::run_on(ranks, &config, &options).unwrap().unwrap().digest, expected);
        // The second time they go on from the middle.
        std::fs::remove_dir_all(out.path().join("checkpoints/step-000004")).unwrap();
    }
}

/// Trains on metering around lockstep around a toy that casts, with a host for all other ops. Returns the digest, and how
/// often the toy of each rank cast. The cast `wrong.1` of rank `wrong.0` goes wrong.
fn under_construction(config: &Config, ranks: usize, wrong: Option<(usize, usize)>) -> (Result<String>, Vec<usize>) {
    let hosts = || Host::ranks(ranks, HostOptions { threads: 1, ..HostOptions::default() }).unwrap();
    let (mut nests, mut casts) = (Vec::new(), Vec::new());
    for (reference, host) in hosts().into_iter().zip(hosts()) {
        let wrong = wrong.filter(|(rank, _)| *rank == host.caps().rank);
        let toy = Toy::new(host.caps(), wrong.map(|(_, cast)| cast));
        casts.push(toy.casts());
        let helped = Fallback::new(toy, host, &["cast"]).unwrap();
        let nest = Metered::new(Lockstep::new(reference, helped).unwrap());
        nests.push(Box::new(nest) as Box<dyn Backend>);
    }
    let out = tempfile::tempdir().unwrap();
    let digest = train::run_on(nests, config, &options(out.path())).map(|run| run.unwrap().digest);
    (digest, casts.iter().map(|casts| casts.load(Ordering::Relaxed)).collect())
}

#[test]
fn a_backend_under_construction_trains_with_the_digest_of_the_host() {
    let config = config(&["train.recipe=\"bf16\"", "train.steps=2"]);
    let expected = digest(&config, |_| {});
    for ranks in [1, 2] {
        let (digest, casts) = under_construction(&config, ranks, None);
        assert_eq!(digest.unwrap(), expected);
        assert!(casts.iter().all(|casts| *casts > 0), "the toy has nothing to do");
    }
}

#[test]
fn a_wrong_op_of_a_backend_under_construction_is_found_where_it_is() {
    let config = config(&["train.recipe=\"bf16\"", "train.steps=2"]);
    // Not the first one.
    let wrong = 2;
    let (found, casts) = under_construction(&config, 2, Some((1, wrong)));
    match found {
        Err(Error::Core(CoreError::Divergence(found)) | Error::Step { source: CoreError::Divergence(found), .. }) => {
            assert_eq!((found.op, found.rank, found.examined), ("cast", 1, "toy"));
            assert_eq!(found.expected ^ 1, found.found);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(casts[1], wrong, "nothing goes on after that");
}

#[test]
fn processes_with_different_configurations_do_not_start() {
    let (out, config) = (tempfile::tempdir().unwrap(), config(&["train.steps=1"]));
    let of_rank = |rank: usize| {
        let config = config.with(&[format!("train.seed={}", 1 + rank / 3)]).unwrap();
        (config, TrainOptions { ranks: 4, ..options(out.path()) })
    };
    for result in apart(&config, of_rank) {
        assert_eq!(result.unwrap_err().to_string(), "rank 3 has another configuration than rank 0");
    }
    assert!(!out.path().join("checkpoints").exists());
}

#[test]
fn killed_at_any_point_and_resumed_a_run_ends_with_the_same_digest() {
    let mut set = vec!["train.checkpoint_interval=2"];
    let expected = digest(&config(&set), |_| {});
    set.extend(SMALL.iter().chain(RUN));
    let out = tempfile::tempdir().unwrap();
    let run = |wait: Option<Duration>| -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dropless"));
        let run = out.path().join("run");
        command.args(["train", "--ranks", "2", "--out"]).arg(&run);
        if newest(&run).unwrap().checkpoint.is_some() {
            command.arg("--resume");
        } else {
            // Killed before its first checkpoint, it begins again.
            let _ = std::fs::remove_dir_all(&run);
        }
        set.iter().for_each(|s| {
            command.args(["--set", s]);
        });
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        if let Some(wait) = wait {
            std::thread::sleep(wait);
            // SIGKILL on Unix.
            let _ = child.kill();
        }
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
    };
    for wait in [150, 400, 90, 620, 250, 330] {
        run(Some(Duration::from_millis(wait)));
    }
    let last = run(None);
    assert!(last.contains(&expected), "{expected} in {last}");
}

#[test]
fn any_gpu_has_the_digest_of_the_host() {
    if dropless_wgpu::adapters().is_empty() && !Need::Wgpu.required() {
        println!("skipped: no adapter for wgpu");
        return;
    }
    for model in [SMALL].into_iter().chain(OTHERS) {
        for recipe in ["f32", "bf16", "mxfp8", "fp8-block"] {
            let config = of(model, &[&format!("train.recipe=\"{recipe}\"")]);
            let steps = |backend, ranks| {
                let options = TrainOptions { backend, ranks, ..TrainOptions::default() };
                train::steps_in_memory(&config, &options, 2).unwrap().unwrap()
            };
            let expected = steps(BackendKind::Host, 1);
            for ranks in [1, 2] {
                assert_eq!(steps(BackendKind::Wgpu, ranks), expected, "{model:?}, {recipe}, {ranks} ranks");
            }
        }
        for linear in ["mxfp8", "fp8-block"] {
            let linear = format!("train.linear_recipe=\"{linear}\"");
            let set = if model == SMALL { vec![&linear[..], WHOLE_BLOCKS] } else { vec![&linear[..]] };
            let steps = |backend, ranks| {
                let options = TrainOptions { backend, ranks, ..TrainOptions::default() };
                train::steps_in_memory(&of(model, &set), &options, 2).unwrap().unwrap()
            };
            assert_eq!(steps(BackendKind::Wgpu, 2), steps(BackendKind::Host, 1), "{model:?}, {linear}");
        }
        // A run that two ranks of the host began goes on with four of the GPU.
        let config = of(model, &["train.steps=2", "train.checkpoint_interval=1", "train.keep_checkpoints=0"]);
        let out = tempfile::tempdir().unwrap();
        let host = TrainOptions { ranks: 2, ..options(out.path()) };
        let expected = train::run(&config, &host).unwrap().unwrap().digest;
        std::fs::remove_dir_all(out.path().join("checkpoints/step-000002")).unwrap();
        let rest = TrainOptions { backend: BackendKind::Wgpu, ranks: 4, resume: true, ..host };
        assert_eq!(train::run(&config, &rest).unwrap().unwrap().digest, expected, "{model:?}, resumed");
    }
    let config = config(&["moe.expert_shards=2"]);
    let steps = |backend, layout| {
        let options = in_groups(layout, TrainOptions { backend, ..TrainOptions::default() });
        train::steps_in_memory(&config, &options, 2).unwrap().unwrap()
    };
    let expected = steps(BackendKind::Host, (1, 1));
    for layout in [(1, 1), (2, 1), (4, 2)] {
        assert_eq!(steps(BackendKind::Wgpu, layout), expected, "{layout:?}");
    }
}
