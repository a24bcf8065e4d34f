//! What a training step reads back from the device: numbers to log, after its gradients, and nothing else.

use dropless::config::Config;
use dropless::options::TrainOptions;
use dropless::train;
use dropless_core::Backend;
use dropless_core::host::{Host, HostOptions};
use dropless_tests::metered::{Call, Metered};

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
    let rank = Metered::new(Host::new(HostOptions::default()).unwrap());
    let calls = rank.calls();
    let ranks: Vec<Box<dyn Backend>> = vec![Box::new(rank)];
    train::run_on(ranks, &config, &TrainOptions { out: out.path().into(), ..TrainOptions::default() }).unwrap();

    let calls = calls.lock();
    // Before the first product, the ranks compare their configurations.
    let mut calls = &calls[calls.iter().position(|&call| call == Call::Gemm).unwrap()..];
    let experts = 4 * config.model.architecture().moe().unwrap().experts;
    for step in 1..=config.train.steps {
        // Products of both micro-batches follow each other without a read, and so do the reads before the update.
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
