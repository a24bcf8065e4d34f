//! The memory that a run is said to need, against what real runs of the host ask for; and runs that do not fit.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;

use dropless::backends;
use dropless::config::Config;
use dropless::options::{BackendKind, TrainOptions};
use dropless::train::{self, Need};
use dropless_core::backend::{Event, Queue, Timings};
use dropless_core::host::{Host, HostOptions};
use dropless_core::ops::Op;
use dropless_core::{Backend, Caps, Checked, DType, Memory, Result, Tensor};
use dropless_tests::metered::Metered;

/// A rank whose meter outlives the run.
#[derive(Debug)]
struct Shared(Arc<Metered<Host>>);

impl Shared {
    fn run<'a, T: Op<'a>>(&self, op: &Checked<T>) -> Result<()> {
        T::queue(op, &*self.0)
    }
}

impl Backend for Shared {
    fn caps(&self) -> &Caps {
        self.0.caps()
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        self.0.alloc(dtype, shape, memory)
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        self.0.write(dst, bytes)
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        self.0.read(src, bytes)
    }

    fn wait(&self) -> Result<()> {
        self.0.wait()
    }

    fn timings(&self) -> Result<Option<Timings>> {
        self.0.timings()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        self.0.record(queue)
    }

    fn wait_for(&self, queue: Queue, event: &Event) -> Result<()> {
        self.0.wait_for(queue, event)
    }

    dropless_core::each_op!(run: grouped_gemm, group_quantize, all_to_all, offload, route, attention, map);
}

const DEEPSEEK: &[&str] = &[
    "model.hidden_size=64",
    "model.intermediate_size=64",
    "model.moe_intermediate_size=32",
    "model.num_hidden_layers=3",
    "model.num_attention_heads=2",
    "model.n_routed_experts=8",
    "model.num_nextn_predict_layers=1",
];

const QWEN: &[&str] = &[
    "model.family=\"qwen3_moe\"",
    "model.hidden_size=64",
    "model.intermediate_size=64",
    "model.moe_intermediate_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.head_dim=24",
    "model.num_experts=8",
    "model.tie_word_embeddings=true",
];

const MIXTRAL: &[&str] = &[
    "model.family=\"mixtral\"",
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=1",
    "model.head_dim=16",
    "model.num_local_experts=4",
];

const RUN: &[&str] = &[
    "train.sequence_length=32",
    "train.batch_size=8",
    "train.micro_batch_size=4",
    "train.grad_shards=4",
    "train.warmup_steps=1",
    "train.eval_batches=1",
    "train.eval_interval=1",
    "data.validation_fraction=0.01",
    "train.steps=2",
];

const OFFLOAD: &[&str] = &[
    "activations.attention_input=\"offload\"",
    "activations.qkv=\"offload\"",
    "activations.mlp_input=\"recompute\"",
    "activations.dispatched=\"offload\"",
    "activations.gate_up=\"offload\"",
    "activations.expert_hidden=\"recompute\"",
];

fn config(parts: &[&[&str]]) -> Config {
    let all: Vec<String> = parts.iter().copied().flatten().map(|s| (*s).to_owned()).collect();
    Config::load(None, &all).unwrap()
}

/// What was said for a rank, and what each asked for: the most in the memory of the device and in that of the host.
fn said_and_asked(config: &Config, ranks: usize, expert_parallel: usize) -> ([u64; 2], Vec<[u64; 2]>) {
    let options = HostOptions { threads: 1, expert_ranks: Some(expert_parallel), ..HostOptions::default() };
    let meters: Vec<_> = Host::ranks(ranks, options).unwrap().into_iter().map(|h| Arc::new(Metered::new(h))).collect();
    let place = backends::place(BackendKind::Host, meters[0].caps());
    let said = train::of_rank(config, meters[0].caps(), &place).unwrap().most;
    let out = tempfile::tempdir().unwrap();
    let options = TrainOptions { out: out.path().into(), ranks, ..TrainOptions::default() };
    let boxed = meters.iter().map(|meter| Box::new(Shared(meter.clone())) as Box<dyn Backend>).collect();
    train::run_on(boxed, config, &options).unwrap();
    let most = |meter: &Metered<Host>| [Memory::Device, Memory::Host].map(|memory| meter.most_of(memory) as u64);
    ([said.device, said.host], meters.iter().map(|meter| most(meter)).collect())
}

/// All that differs is what lives while nothing else does.
#[test]
fn f16_what_is_said_is_what_a_run_asks_for() {
    let shards = &["moe.expert_shards=2"][..];
    let chunks = &["moe.chunks=2"][..];
    let fp8 = &["train.linear_recipe=\"fp8-block\""][..];
    let cases: [(&str, Config, usize, usize); 12] = [
        ("deepseek", config(&[DEEPSEEK, RUN]), 1, 1),
        ("deepseek f32", config(&[DEEPSEEK, RUN, &["train.recipe=\"f32\""]]), 1, 1),
        ("deepseek mxfp8", config(&[DEEPSEEK, RUN, &["train.recipe=\"mxfp8\""]]), 2, 2),
        ("deepseek fp8-block", config(&[DEEPSEEK, RUN, &["train.recipe=\"fp8-block\""]]), 1, 1),
        ("deepseek linear fp8-block", config(&[DEEPSEEK, RUN, fp8]), 2, 2),
        ("qwen linear fp8-block", config(&[QWEN, RUN, fp8, &["train.bias_update_rate=0.0"]]), 1, 1),
        ("deepseek offloaded", config(&[DEEPSEEK, RUN, OFFLOAD]), 1, 1),
        ("deepseek offloaded, two replicas", config(&[DEEPSEEK, RUN, OFFLOAD, shards]), 4, 2),
        ("deepseek in chunks", config(&[DEEPSEEK, RUN, chunks]), 2, 2),
        ("qwen", config(&[QWEN, RUN, &["train.bias_update_rate=0.0"]]), 1, 1),
        ("qwen, replicas", config(&[QWEN, RUN, shards, &["train.bias_update_rate=0.0"]]), 2, 1),
        ("mixtral", config(&[MIXTRAL, RUN, &["train.bias_update_rate=0.0"]]), 2, 2),
    ];
    for (name, config, ranks, expert_parallel) in cases {
        let (said, asked) = said_and_asked(&config, ranks, expert_parallel);
        println!("{name}: {said:?} {asked:?}");
        // The ranks' parts of a checkpoint differ, and the largest counts.
        let most = [0, 1].map(|memory| asked.iter().map(|asked| asked[memory]).max().unwrap());
        let alike = asked.iter().all(|asked| asked[0] == said[0]);
        assert!(said[0] > 0 && alike && most == said, "{name}: said {said:?}, asked {asked:?}");
    }
}

#[test]
fn f16_the_sum_has_every_part_and_is_refused_where_it_does_not_fit() {
    let config = config(&[DEEPSEEK, RUN]);
    let options = TrainOptions { ranks: 2, ..TrainOptions::default() };
    let need = Need::of(&options.open_ranks(config.train.numerics.into()).unwrap(), &config, &options).unwrap();
    let rank = need.rank;
    assert_eq!(rank.moments, 2 * (rank.parameters - 4 * 3 * 8), "biases have no moments: {rank:?}");
    assert!(rank.copies > 0 && rank.gradients > rank.parameters && rank.exchange > 0);
    let held = rank.parameters + rank.copies + rank.moments + rank.gradients;
    assert_eq!(rank.most.device, held + rank.working);
    assert!(need.host > need.device && need.device == 2 * rank.most.device);
    need.check().unwrap();
}

/// What becomes ids when the run starts is in memory; what is mapped is not, whatever the tokenizer.
#[test]
fn f16_prepared_ids_take_no_memory_and_lines_of_json_do() {
    let dir = tempfile::tempdir().unwrap();
    let text = |name: &str, tokenizer: &str| {
        std::fs::write(dir.path().join(name), vec![0; 1 << 20]).unwrap();
        let mut config = config(&[DEEPSEEK, RUN]);
        config.data.train = vec![dir.path().join(name).to_str().unwrap().to_owned()];
        config.data.tokenizer = tokenizer.to_owned().into();
        let options = TrainOptions::default();
        let need = Need::of(&options.open_ranks(config.train.numerics.into()).unwrap(), &config, &options).unwrap();
        let table = need.to_string();
        let row = table.lines().find(|line| line.trim_start().starts_with("text ")).unwrap();
        row.split_whitespace().nth(1).unwrap().to_owned()
    };
    for (name, tokenizer, mib) in [
        ("ids.bin", "tokenizer.json", "0.0"),
        ("ids.idx", "tokenizer.json", "0.0"),
        ("text.txt", "byte", "0.0"),
        ("text.txt", "tokenizer.json", "9.0"),
        ("text.jsonl", "byte", "9.0"),
        ("text.ndjson", "byte", "9.0"),
    ] {
        assert_eq!(text(name, tokenizer), mib, "{name} {tokenizer}");
    }
}

#[cfg(target_os = "linux")]
mod program {
    use std::process::{Command, Output};

    fn limited(dir: &std::path::Path, arguments: &str) -> Output {
        let shell = format!("ulimit -v 6000000; exec {} train {arguments}", env!("CARGO_BIN_EXE_dropless"));
        Command::new("sh").args(["-c", &shell]).current_dir(dir).output().unwrap()
    }

    #[test]
    fn f16_a_run_that_does_not_fit_is_refused_in_a_line_before_it_begins() {
        let dir = tempfile::tempdir().unwrap();
        for (set, words) in [
            ("--set model.vocab_size=6000000", "memory: the host needs at least "),
            ("--set model.num_hidden_layers=100000", "memory: the host needs at least "),
            ("--set train.batch_size=8000000 --set train.sequence_length=128", "memory: the host needs "),
        ] {
            for dry in ["", " --dry-run"] {
                let output = limited(dir.path(), &format!("{set} --threads 1 --backend host{dry}"));
                let line = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(2), "{set}: {line}");
                assert!(
                    line.lines().count() == 1 && line.contains(words) && line.contains("may be used"),
                    "{set}: {line}"
                );
                assert!(line.contains("the limit of its address space"), "{line}");
            }
        }
    }

    #[test]
    fn a_dry_run_says_what_a_run_needs_and_does_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let output = limited(dir.path(), "--threads 1 --backend host --dry-run --out run");
        let table = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for row in ["parameters ", "moments ", "gradients ", "copy of a rank for checkpoints ", "host, 1 rank: "] {
            assert!(table.lines().any(|line| line.trim_start().starts_with(row)), "{row}: {table}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
