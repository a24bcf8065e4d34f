//! What a training step reads back from the device: numbers to log, after its gradients, and nothing else.

#![expect(clippy::unwrap_used, reason = "tests may panic")]

use std::sync::{Arc, Mutex};

use dropless::config::Config;
use dropless::options::TrainOptions;
use dropless::train;
use dropless_core::backend::Timings;
use dropless_core::host::{Host, HostOptions};
use dropless_core::ops::{AllToAll, Attention, GroupQuantize, GroupedGemm, Map, Offload, Route};
use dropless_core::{Backend, Caps, Checked, DType, Event, Memory, Queue, Result, Tensor};

/// A call that matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    /// Bytes.
    Read(usize),
    Wait,
    Gemm,
    AdamW,
}

/// A backend whose calls are written down.
#[derive(Debug)]
struct Watched {
    inner: Host,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Watched {
    fn note(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }
}

impl Backend for Watched {
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
        self.note(Call::Read(bytes.len()));
        self.inner.read(src, bytes)
    }

    fn wait(&self) -> Result<()> {
        self.note(Call::Wait);
        self.inner.wait()
    }

    fn timings(&self) -> Result<Option<Timings>> {
        self.inner.timings()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        self.inner.record(queue)
    }

    fn wait_for(&self, queue: Queue, event: &Event) -> Result<()> {
        self.inner.wait_for(queue, event)
    }

    fn grouped_gemm(&self, op: &Checked<GroupedGemm<'_>>) -> Result<()> {
        self.note(Call::Gemm);
        self.inner.grouped_gemm(op)
    }

    fn group_quantize(&self, op: &Checked<GroupQuantize<'_>>) -> Result<()> {
        self.inner.group_quantize(op)
    }

    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()> {
        self.inner.all_to_all(op)
    }

    fn set_away(&self, away: bool) -> Result<()> {
        self.inner.set_away(away)
    }

    fn offload(&self, op: &Checked<Offload<'_>>) -> Result<()> {
        self.inner.offload(op)
    }

    fn route(&self, op: &Checked<Route<'_>>) -> Result<()> {
        self.inner.route(op)
    }

    fn attention(&self, op: &Checked<Attention<'_>>) -> Result<()> {
        self.inner.attention(op)
    }

    fn map(&self, op: &Checked<Map<'_>>) -> Result<()> {
        if matches!(&**op, Map::AdamW(_)) {
            self.note(Call::AdamW);
        }
        self.inner.map(op)
    }
}

#[test]
fn a_step_reads_back_what_it_logs_and_nothing_else() {
    let out = tempfile::tempdir().unwrap();
    let small = [
        "model.hidden_size=32",
        "model.intermediate_size=32",
        "model.moe_intermediate_size=32",
        "model.num_hidden_layers=2",
        "train.recipe=\"mxfp8\"",
        "train.sequence_length=16",
        "train.batch_size=8",
        "train.micro_batch_size=4",
        "train.steps=3",
        "train.eval_interval=0",
        "data.validation_fraction=0.003",
    ];
    let config = Config::load(None, &small.map(str::to_owned)).unwrap();
    let calls = Arc::new(Mutex::new(Vec::new()));
    let inner = Host::new(HostOptions::default()).unwrap();
    let ranks: Vec<Box<dyn Backend>> = vec![Box::new(Watched { inner, calls: calls.clone() })];
    train::run_on(ranks, &config, &TrainOptions { out: out.path().into(), ..TrainOptions::default() }).unwrap();

    let calls = calls.lock().unwrap();
    // Before the first product, the ranks compare their configurations.
    let mut calls = &calls[calls.iter().position(|&call| call == Call::Gemm).unwrap()..];
    let experts = 4 * config.model.n_routed_experts;
    for step in 1..=config.train.steps {
        // Products of both micro-steps follow each other without a read, and so do the reads before the update.
        let reads = calls.iter().position(|call| matches!(call, Call::Read(_) | Call::Wait)).unwrap();
        assert!(
            reads > 40 && calls[..reads].iter().all(|&call| call == Call::Gemm),
            "step {step}: {:?}",
            &calls[..reads]
        );
        let update = reads + calls[reads..].iter().position(|&call| call == Call::AdamW).unwrap();
        for call in &calls[reads..update] {
            // The losses, the norm and the factor of the gradients, and the choices of each expert.
            assert!(matches!(*call, Call::Read(bytes) if bytes <= experts), "step {step}: {call:?}");
        }
        calls = &calls[update..];
        calls = &calls[calls.iter().position(|&call| call != Call::AdamW).unwrap()..];
        // The end of a step is waited for, to time it.
        assert_eq!(calls[0], Call::Wait, "step {step}");
        calls = &calls[1..];
    }
}
