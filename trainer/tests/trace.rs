//! The trace of a step against what a meter below it counts, on a backend whose calls are timed and on one that times its
//! launches itself.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use dropless::config::Config;
use dropless::options::TrainOptions;
use dropless::train;
use dropless_core::backend::{Event, Queue, Timings};
use dropless_core::host::{Host, HostOptions};
use dropless_core::ops::Op;
use dropless_core::trace::{Interval, Launch, LaunchClock};
use dropless_core::{Backend, Caps, Checked, DType, Memory, Result, Tensor};
use dropless_tests::metered::{Metered, Ops};
use serde_json::Value;

const CONFIG: &[&str] = &[
    "model.hidden_size=64",
    "model.intermediate_size=64",
    "model.moe_intermediate_size=32",
    "model.num_hidden_layers=3",
    "model.num_attention_heads=2",
    "model.n_routed_experts=8",
    "model.num_nextn_predict_layers=1",
    "moe.chunks=2",
    "train.sequence_length=32",
    "train.batch_size=8",
    "train.micro_batch_size=4",
    "train.grad_shards=4",
    "train.warmup_steps=1",
    "train.eval_batches=1",
    "data.validation_fraction=0.01",
    "activations.qkv=\"offload\"",
    "activations.dispatched=\"offload\"",
];

fn config(steps: u64, more: &[&str]) -> Config {
    let mut all: Vec<String> = CONFIG.iter().chain(more).map(|s| (*s).to_owned()).collect();
    all.push(format!("train.steps={steps}"));
    Config::load(None, &all).unwrap()
}

/// A device that times its launches, two for each op.
#[derive(Debug)]
struct Clocked {
    inner: Metered<Host>,
    launches: Mutex<Option<(Instant, Vec<Launch>)>>,
    /// The queue whose launches are not noted.
    lost: Option<Queue>,
}

impl Clocked {
    fn new(inner: Metered<Host>, lost: Option<Queue>) -> Clocked {
        Clocked { inner, launches: Mutex::default(), lost }
    }

    fn run<'a, T: Op<'a>>(&self, op: &Checked<T>) -> Result<()> {
        let queue = queue_of(op.name());
        let started = Instant::now();
        T::queue(op, &self.inner)?;
        let (middle, ended) = (started + started.elapsed() / 2, Instant::now());
        if let (Some((zero, launches)), true) = (&mut *self.launches.lock().unwrap(), self.lost != Some(queue)) {
            for (name, from, to) in [("first", started, middle), ("second", middle, ended)] {
                launches.push(Launch { name, queue, time: Interval { begin: from - *zero, end: to - *zero } });
            }
        }
        Ok(())
    }
}

impl LaunchClock for Clocked {
    fn start(&self) -> Result<Instant> {
        let now = Instant::now();
        *self.launches.lock().unwrap() = Some((now, Vec::new()));
        Ok(now)
    }

    fn queued(&self) -> usize {
        self.launches.lock().unwrap().as_ref().map_or(0, |(_, launches)| launches.len())
    }

    fn stop(&self) -> Result<Vec<Launch>> {
        Ok(self.launches.lock().unwrap().take().unwrap().1)
    }
}

impl Backend for Clocked {
    fn caps(&self) -> &Caps {
        self.inner.caps()
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        self.inner.alloc(dtype, shape, memory)
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        self.inner.write(dst, bytes)
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        self.inner.read(src, bytes)
    }

    fn wait(&self) -> Result<()> {
        self.inner.wait()
    }

    fn timings(&self) -> Result<Option<Timings>> {
        self.inner.timings()
    }

    fn launch_clock(&self) -> Option<&dyn LaunchClock> {
        Some(self)
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        self.inner.record(queue)
    }

    fn wait_for(&self, queue: Queue, event: &Event) -> Result<()> {
        self.inner.wait_for(queue, event)
    }

    dropless_core::each_op!(run: grouped_gemm, group_quantize, all_to_all, offload, route, attention, map);
}

fn queue_of(op: &str) -> Queue {
    match op {
        "all_to_all" => Queue::Comm,
        "offload" => Queue::Offload,
        _ => Queue::Compute,
    }
}

/// The ranks of the host, each around a meter.
type Around = fn(Metered<Host>) -> Box<dyn Backend>;

fn timed_by_calls(metered: Metered<Host>) -> Box<dyn Backend> {
    Box::new(metered)
}

fn timed_by_launches(metered: Metered<Host>) -> Box<dyn Backend> {
    Box::new(Clocked::new(metered, None))
}

/// Two ranks train; the digest, and the ops of the first rank.
fn run(config: &Config, around: Around, trace: Option<&Path>) -> (String, Ops) {
    let options = HostOptions { threads: 1, ..HostOptions::default() };
    let meters: Vec<_> = Host::ranks(2, options).unwrap().into_iter().map(Metered::new).collect();
    let ops = meters[0].ops();
    let out = tempfile::tempdir().unwrap();
    let trace = trace.map(Path::to_owned);
    let options = TrainOptions { out: out.path().into(), ranks: 2, trace, ..TrainOptions::default() };
    let summary = train::run_on(meters.into_iter().map(around).collect(), config, &options).unwrap();
    let ops = ops.lock().clone();
    (summary.unwrap().digest, ops)
}

fn events(path: &Path) -> (Value, Vec<Value>) {
    let trace: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap().clone();
    (trace, events)
}

/// The ops on the tracks of the queues, on the right one each.
fn ops_on_queues(events: &[Value]) -> BTreeMap<String, usize> {
    let mut ops = BTreeMap::new();
    for event in events.iter().filter(|event| event["cat"] == "op") {
        let op = event["args"]["op"].as_str().unwrap();
        let track = match queue_of(op) {
            Queue::Compute => 1,
            Queue::Comm => 2,
            Queue::Offload => 3,
        };
        assert_eq!((&event["pid"], &event["tid"]), (&Value::from(2), &Value::from(track)), "{event}");
        *ops.entry(op.to_owned()).or_default() += 1;
    }
    ops
}

fn nanoseconds(event: &Value, key: &str) -> u64 {
    let time = event[key].as_f64().unwrap();
    assert!(time >= 0.0, "{event}");
    format!("{:.0}", time * 1e3).parse().unwrap()
}

/// Asserts that on each track an event lies within another or follows it.
fn assert_nested(events: &[Value]) {
    let mut tracks: BTreeMap<(u64, u64), Vec<(u64, u64)>> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let (begin, length) = (nanoseconds(event, "ts"), nanoseconds(event, "dur"));
        let track = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        tracks.entry(track).or_default().push((begin, begin + length));
    }
    assert_eq!(tracks.len(), 4, "the host and three queues: {:?}", tracks.keys());
    for (track, mut events) in tracks {
        events.sort_by_key(|&(begin, end)| (begin, std::cmp::Reverse(end)));
        let mut open: Vec<(u64, u64)> = Vec::new();
        for event in events {
            open.retain(|around| around.1 > event.0);
            let within = open.last().is_none_or(|around| event.1 <= around.1);
            assert!(within, "track {track:?}: {event:?} begins in {:?} and ends after it", open.last());
            open.push(event);
        }
    }
}

#[test]
fn a_trace_has_every_op_of_its_step_and_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let [two, three] = [2, 3].map(|steps| run(&config(steps, &[]), timed_by_calls, None));
    // The third step's.
    let step: BTreeMap<String, usize> =
        three.1.iter().map(|(op, count)| ((*op).to_owned(), count - two.1.get(op).unwrap_or(&0))).collect();
    let step: BTreeMap<_, _> = step.into_iter().filter(|(_, count)| *count > 0).collect();
    for needed in ["grouped_gemm", "attention_forward", "attention_backward", "all_to_all", "offload", "adamw"] {
        assert!(step.contains_key(needed), "{needed}: {step:?}");
    }
    for around in [timed_by_calls as Around, timed_by_launches] {
        for steps in [3, 4] {
            let config = config(steps, &[]);
            let untraced = if steps == 3 { three.clone() } else { run(&config, around, None) };
            assert_eq!(run(&config, around, Some(&path)), untraced, "{steps} steps");
            let (trace, events) = events(&path);
            assert_eq!(trace["otherData"]["step"], 3);
            assert_eq!(ops_on_queues(&events), step, "{steps} steps");
            assert_nested(&events);
            let launches = events.iter().filter(|event| event["cat"] == "launch").count();
            let expected =
                if trace["otherData"]["queues"].as_str().unwrap().starts_with("device time") { 2 } else { 0 };
            assert_eq!(launches, expected * step.values().sum::<usize>());
            fs::remove_file(&path).unwrap();
        }
    }
}

#[test]
fn a_queue_whose_launches_are_lost_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let config = config(1, &[]);
    let rank = |around: Around| {
        run(&config, around, Some(&path));
        ops_on_queues(&events(&path).1)
    };
    let whole = rank(timed_by_launches);
    let cases: [(Queue, Around); 3] = [
        (Queue::Compute, |metered| Box::new(Clocked::new(metered, Some(Queue::Compute)))),
        (Queue::Comm, |metered| Box::new(Clocked::new(metered, Some(Queue::Comm)))),
        (Queue::Offload, |metered| Box::new(Clocked::new(metered, Some(Queue::Offload)))),
    ];
    for (lost, around) in cases {
        let left: BTreeMap<_, _> = whole.clone().into_iter().filter(|(op, _)| queue_of(op) != lost).collect();
        assert!(left.len() < whole.len(), "{lost:?} has ops");
        assert_eq!(rank(around), left, "without the launches of {lost:?}");
    }
}

#[test]
fn an_op_has_its_layer_shape_bytes_and_rate() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    run(&config(1, &[]), timed_by_calls, Some(&path));
    let (_, events) = events(&path);
    let ops: Vec<&Value> = events.iter().filter(|event| event["cat"] == "op").map(|event| &event["args"]).collect();
    let of = |op: &'static str| ops.iter().filter(move |args| args["op"] == op);
    // Twice, for two micro-batches of one sequence on this rank.
    let layers: Vec<_> = of("attention_backward").map(|args| args["layer"].as_u64()).collect();
    assert_eq!(layers, [None, Some(2), Some(1), Some(0)].repeat(layers.len() / 4));
    assert!(of("attention_forward").any(|args| args["part"] == "micro-batch 1 / forward / layer 2 / attention"));
    assert!(of("adamw").all(|args| args["layer"].is_null() && args["part"] == "update"));
    let product = of("grouped_gemm").find(|args| args["part"] == "micro-batch 0 / head").unwrap();
    assert_eq!(product["kind"], "forward");
    // 32 tokens of 64 elements times the table, each two bytes, to logits in f32.
    let (tokens, hidden, vocabulary) = (64.0, 64.0, 288.0);
    assert_eq!(product["flop"].as_f64().unwrap(), 2.0 * tokens * hidden * vocabulary, "{product}");
    assert!(product["TFLOP/s"].as_f64().unwrap() > 0.0 && product["GB/s"].as_f64().unwrap() > 0.0);
    for args in ops {
        assert!(args["bytes"].as_u64().unwrap() > 0 && !args["tensors"].as_object().unwrap().is_empty(), "{args}");
        let counted =
            matches!(args["op"].as_str().unwrap(), "grouped_gemm" | "attention_forward" | "attention_backward");
        assert_eq!(args["flop"].is_number(), counted, "{args}");
    }
}

/// The operations of a step's ops are those by which the speed of a run is reported.
#[test]
fn the_operations_add_up_to_those_of_the_model() {
    let families = [
        &[][..],
        &["model.family=\"qwen3_moe\"", "model.num_key_value_heads=1", "model.num_experts=8"],
        &["train.recipe=\"f32\""],
    ];
    for more in families {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.json");
        let more = [more, &["train.steps=1"]].concat();
        let keys = |key: &&str| !more[0].contains("qwen") || !(key.contains("n_routed") || key.contains("nextn"));
        let all: Vec<String> = CONFIG.iter().filter(|key| keys(key)).chain(&more).map(|s| (*s).to_owned()).collect();
        let config = Config::load(None, &all).unwrap();
        let options = TrainOptions { out: dir.path().into(), trace: Some(path.clone()), ..TrainOptions::default() };
        train::run(&config, &options).unwrap();
        let (_, events) = events(&path);
        let ops = events.iter().filter(|event| event["cat"] == "op");
        let sum: f64 = ops.filter_map(|event| event["args"]["flop"].as_f64()).sum();
        let metrics = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
        let line: Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
        let [rate, tokens, seconds] =
            ["tflops_per_rank", "tokens_per_s", "step_s"].map(|key| line[key].as_f64().unwrap());
        let expected = rate * 1e12 * seconds;
        assert!((sum / expected - 1.0).abs() < 1e-9, "{more:?}: {sum:e} and {expected:e}, {}", tokens * seconds);
    }
}
