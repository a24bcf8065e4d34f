//! `dropless doctor`: what this machine and this program offer, and whether it computes the right bits.

use std::fmt::Write;

use dropless_core::host::Simd;
use dropless_model::words::count;

use crate::backends;
use crate::config::Config;
use crate::options::{BackendKind, TrainOptions};
use crate::train::steps_in_memory;

/// One line for each backend and adapter.
pub(super) fn report() -> String {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut out = format!("dropless {}\n", env!("CARGO_PKG_VERSION"));
    let simd: Vec<String> = Simd::ALL
        .iter()
        .map(|level| {
            let state = if !level.available() {
                "not on this machine"
            } else if *level == Simd::best() {
                "used"
            } else {
                "available"
            };
            format!("{} {state}", format!("{level:?}").to_lowercase())
        })
        .collect();
    // Writing to a string cannot fail.
    let _ = writeln!(out, "host  available: {}; {}", count(threads, "thread"), simd.join(", "));
    for line in backends::report(check) {
        let _ = writeln!(out, "{line}");
    }
    out
}

/// A model that one step takes through every op of training in a moment.
const TINY: [&str; 11] = [
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.moe_intermediate_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=1",
    "model.n_routed_experts=4",
    "model.n_group=2",
    "train.recipe=\"mxfp8\"",
    "train.sequence_length=16",
    "train.batch_size=4",
    "train.micro_batch_size=4",
];

/// Whether a backend computes the bits of the host in a training step.
fn check(backend: BackendKind, adapter: Option<usize>) -> String {
    let adapter = adapter.map(|index| index.to_string());
    let options = TrainOptions { backend, adapter, ..TrainOptions::default() };
    let step = || steps_in_memory(&Config::load(None, &TINY.map(str::to_owned))?, &options, 1);
    match step() {
        Ok(_) => "available, a training step has the bits of the host".into(),
        Err(error) => format!("unusable: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_is_one_that_a_backend_can_take() {
        let said = check(BackendKind::Host, None);
        assert!(said.starts_with("available"), "{said}");
    }
}
