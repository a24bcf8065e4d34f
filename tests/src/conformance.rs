//! A recording of problems of every op on the wgpu backend, for browsers and other devices to run again.

use dropless_core::{Backend, Error, NumericModel};
use dropless_wgpu::recording::{Recorder, Recording, RecordingError};
use dropless_wgpu::{Wgpu, WgpuOptions};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngSeed, TestRunner};

use crate::differential::{Problem, compare, draws, host};
use crate::ops;

/// Words of an op's results that are kept, so that a page can say what was expected.
const KEPT: u64 = 1 << 12;

/// Records `each` problems (of attention one) of every kind that is wanted by its name and that one rank can work on, whose results have the bits of the host.
///
/// # Errors
/// When there is no adapter, or the device fails.
///
/// # Panics
/// When a result has other bits.
pub fn record(each: usize, wanted: impl Fn(&str) -> bool) -> Result<Recording, RecordingError> {
    let recorder = Recorder::keeping(KEPT);
    let first = Wgpu::new(&WgpuOptions { recorder: Some(recorder.clone()), ..WgpuOptions::default() })?;
    let problems: Vec<Problem> =
        ops::problems().into_iter().filter(|problem| problem.ranks == 1 && wanted(problem.name)).collect();
    let on = |numerics| -> Result<Vec<Box<dyn Backend>>, Error> { Ok(vec![Box::new(first.with_numerics(numerics)?)]) };
    let backends = [NumericModel::Hopper, NumericModel::F32].map(|numerics| (numerics, on(numerics)));
    for (numerics, backend) in backends {
        let backend = backend?;
        for problem in problems.iter().filter(|problem| problem.numerics == numerics) {
            recorder.section(problem.name);
            let mut runner = TestRunner::new(Config {
                rng_seed: RngSeed::Fixed(20260),
                failure_persistence: None,
                ..Config::default()
            });
            let host = host(1, numerics)?;
            // Those of attention are large, and of many kinds.
            let several = problem.varied && !problem.name.starts_with("attention");
            for _ in 0..if several { each } else { 1 } {
                let draw = draws().new_tree(&mut runner).unwrap().current();
                compare(problem.outcome(&draw, &host), problem.outcome(&draw, &backend)).unwrap();
            }
        }
    }
    let program = concat!("dropless ", env!("CARGO_PKG_VERSION"));
    let title = format!("Conformance: {} kinds of problems, up to {each} of each", problems.len());
    recorder.finish(program, &title, &first.caps().device, None)
}
