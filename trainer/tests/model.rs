//! The model against another framework, and what a step may and may not change.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::{Path, PathBuf};

use dropless::config::{Config, Recipe};
use dropless::options::TrainOptions;
use dropless::train::reference;
use dropless::verify::{Outcome, Report};
use dropless_core::host::{Host, HostOptions};
use dropless_core::{Backend, DType, NumericModel};
use dropless_model::hf::TensorFiles;
use dropless_model::nn::Tokens;
use dropless_model::{Inputs, Model};
use dropless_tests::metered::Metered;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data");

/// The model directories in `tests/data/KIND`.
fn model_dirs(kind: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(Path::new(DATA).join(kind)).unwrap().map(|entry| entry.unwrap().path());
    let mut dirs: Vec<PathBuf> = entries.filter(|path| path.join("config.json").exists()).collect();
    dirs.sort();
    dirs
}

fn report(dir: &Path, ranks: usize, expert_ranks: usize) -> Report {
    let options = TrainOptions { ranks, expert_parallel: Some(expert_ranks), threads: 2, ..TrainOptions::default() };
    let computed = reference::compute(dir, NumericModel::F32, Recipe::F32, &options).unwrap().unwrap();
    let expected = TensorFiles::open_files(vec![dir.join("expected.safetensors")]).unwrap();
    Report::compare(&expected, computed).unwrap()
}

fn sequences(dir: &Path) -> usize {
    let expected = TensorFiles::open_files(vec![dir.join("expected.safetensors")]).unwrap();
    expected.shape("input_ids").unwrap()[0]
}

#[test]
fn logits_loss_and_every_gradient_agree_with_another_framework() {
    let dirs = model_dirs("reference");
    assert!(dirs.len() >= 3, "{dirs:?}");
    for dir in dirs {
        let layouts = [(1, 1), (2, 2), (2, 1)];
        for (ranks, expert_ranks) in layouts.into_iter().filter(|(ranks, _)| sequences(&dir).is_multiple_of(*ranks)) {
            let report = report(&dir, ranks, expert_ranks);
            assert!(report.passed(), "{}, {ranks} ranks, {expert_ranks} share experts\n{report}", dir.display());
        }
    }
}

#[test]
fn what_this_program_wrote_has_the_logits_that_another_framework_found_in_it() {
    let dirs = model_dirs("exported");
    assert_eq!(dirs.len(), 3, "one of each family: {dirs:?}");
    for dir in dirs {
        let report = report(&dir, 1, 1);
        let compared =
            |name: &str| report.rows.iter().any(|row| row.name == name && matches!(row.outcome, Outcome::Error(_)));
        assert!(compared("logits.f32") && compared("loss.f32") && report.passed(), "{}\n{report}", dir.display());
        assert_eq!(report.rows.len(), 2, "no gradient is computed that nothing is compared with\n{report}");
    }
}

/// A small model of one rank with its first weights.
struct Small {
    host: Metered<Host>,
    config: Config,
}

impl Small {
    fn new(more: &[&str]) -> Small {
        let set = [
            "model.hidden_size=32",
            "model.intermediate_size=32",
            "model.moe_intermediate_size=16",
            "model.num_hidden_layers=2",
            "model.num_attention_heads=2",
            "model.n_routed_experts=4",
            "model.n_group=1",
            "model.topk_group=1",
            "train.recipe=\"f32\"",
            "train.numerics=\"f32\"",
            "train.sequence_length=16",
        ];
        let all: Vec<String> = set.iter().chain(more).map(|s| (*s).to_owned()).collect();
        let host = Host::new(HostOptions { numerics: NumericModel::F32, ..HostOptions::default() }).unwrap();
        Small { host: Metered::new(host), config: Config::load(None, &all).unwrap() }
    }

    fn backend(&self) -> &dyn Backend {
        &self.host
    }

    fn model(&self, tokens: &Tokens) -> Model {
        let parts = self.config.model.architecture();
        let mut model = Model::new(self.backend(), &parts, &self.config.options(), tokens).unwrap();
        model.initialise(self.backend(), 1, 0.3).unwrap();
        model.clear_gradients(self.backend()).unwrap();
        model
    }

    /// Sequences of 16 tokens; `scale` 0 leaves the auxiliary loss alone.
    fn inputs(&self, sequences: &[u32], scale: f32) -> Inputs {
        let put = |f: &dyn Fn(u32, u32) -> u32| {
            let values: Vec<u32> =
                sequences.iter().flat_map(|&s| (0..16).map(move |t| (s, t))).map(|(s, t)| f(s, t)).collect();
            self.backend().upload(DType::U32, &[values.len()], &values).unwrap()
        };
        Inputs {
            ids: put(&|s, t| (s * 31 + t * 7) % 256),
            targets: put(&|s, t| (s * 17 + t * 5) % 256),
            positions: put(&|_, t| t),
            start: put(&|_, _| 0),
            scale: self.backend().upload(DType::F32, &[1], &[scale]).unwrap(),
            next: None,
        }
    }

    fn gradients(&self, model: &Model) -> Vec<(String, Vec<f32>)> {
        let sums = model.state.as_ref().unwrap().reduce_shards(self.backend(), &model.params).unwrap();
        let all = sums.by_name(&model.params).unwrap();
        all.into_iter().map(|(name, t)| (name, self.backend().download(&t).unwrap())).collect()
    }
}

#[test]
fn b095_evaluation_counts_nothing_and_leaves_no_gradient() {
    let small = Small::new(&[]);
    let tokens = Tokens::new(small.backend(), 2, 16, 1).unwrap();
    let model = small.model(&tokens);
    let counts =
        || -> Vec<Vec<u32>> { model.balancing().map(|b| small.backend().download(&b.counts).unwrap()).collect() };
    model.step(small.backend(), &tokens, &small.inputs(&[1, 2], 1.0)).unwrap();
    let (counted, gradients) = (counts(), small.gradients(&model));
    assert_eq!(counted[0].iter().sum::<u32>(), 2 * 16 * 2, "every choice of every token once");
    for _ in 0..3 {
        model.evaluate(small.backend(), &tokens, &small.inputs(&[3, 4], 1.0)).unwrap();
    }
    assert_eq!(counts(), counted);
    assert_eq!(small.gradients(&model), gradients);
}

#[test]
fn b127_every_micro_batch_adds_to_the_gradients_until_they_are_cleared() {
    let small = Small::new(&[]);
    let tokens = Tokens::new(small.backend(), 1, 16, 1).unwrap();
    let model = small.model(&tokens);
    let after = |micro_batches: &[u32]| {
        model.clear_gradients(small.backend()).unwrap();
        for &sequence in micro_batches {
            model.step(small.backend(), &tokens, &small.inputs(&[sequence], 1.0)).unwrap();
        }
        small.gradients(&model)
    };
    let (first, second, both) = (after(&[1]), after(&[2]), after(&[1, 2]));
    for (((name, a), (_, b)), (_, sum)) in first.iter().zip(&second).zip(&both) {
        // The table's gradient goes on token by token, so only its value is the same.
        let bound = if name == "model.embed_tokens.weight" { 1e-6 } else { 0.0 };
        for ((a, b), sum) in a.iter().zip(b).zip(sum) {
            assert!((a + b - sum).abs() <= bound * (a.abs() + b.abs()), "{name}: {a} + {b} = {sum}");
        }
    }
}

#[test]
fn b189_the_shared_expert_is_one_mlp_of_the_whole_width() {
    let small = Small::new(&["model.n_shared_experts=2", "model.moe_intermediate_size=4", "model.hidden_size=8"]);
    let model = small.model(&Tokens::new(small.backend(), 1, 16, 1).unwrap());
    let shared: Vec<(String, Vec<usize>)> = model
        .params
        .pieces()
        .unwrap()
        .into_iter()
        .filter(|piece| piece.name.contains("shared_expert"))
        .map(|piece| (piece.name, piece.shape))
        .collect();
    let expected = [("gate_proj", [8, 8]), ("up_proj", [8, 8]), ("down_proj", [8, 8])]
        .map(|(part, shape)| (format!("model.layers.1.mlp.shared_experts.{part}.weight"), shape.to_vec()));
    assert_eq!(shared, expected);
}

#[test]
fn b112_the_auxiliary_loss_does_not_grow_with_the_number_of_micro_batches() {
    let gradient = |batch: usize| {
        let small = Small::new(&[&format!("train.batch_size={batch}"), "train.aux_loss_coefficient=0.01"]);
        let tokens = Tokens::new(small.backend(), 1, 16, 1).unwrap();
        let model = small.model(&tokens);
        for _ in 0..batch {
            model.step(small.backend(), &tokens, &small.inputs(&[5], 0.0)).unwrap();
        }
        small.gradients(&model)
    };
    let (once, four) = (gradient(1), gradient(4));
    let mut reached = 0;
    for ((name, a), (_, b)) in once.iter().zip(&four) {
        for (x, y) in a.iter().zip(b) {
            // A quarter of the gradient, four times: powers of two, so every bit is the same.
            assert_eq!(x.to_bits() << 1, y.to_bits() << 1, "{name}: {x:e} {y:e}");
            reached += usize::from(*x != 0.0 && name.contains("gate.weight"));
        }
    }
    assert!(reached > 0, "the loss reaches the router");
}

#[test]
fn b161_steps_and_evaluations_leave_no_tensors_behind() {
    let small = Small::new(&["train.aux_loss_coefficient=0"]);
    let tokens = Tokens::new(small.backend(), 1, 16, 1).unwrap();
    let model = small.model(&tokens);
    let live = |steps: u32| {
        for step in 0..steps {
            let inputs = small.inputs(&[step], 1.0);
            model.clear_gradients(small.backend()).unwrap();
            model.step(small.backend(), &tokens, &inputs).unwrap();
            model.evaluate(small.backend(), &tokens, &inputs).unwrap();
        }
        small.host.live()
    };
    let after_two = live(2);
    assert!(after_two > 0);
    assert_eq!(live(198), after_two);
}
