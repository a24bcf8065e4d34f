//! How fast a backend's ops are: `dropless bench`.
//!
//! Each line is the median of several samples after a warm-up, on random data, and counts useful work only. A sample is so
//! many calls that it takes a while, and the wait for them. Peers run interleaved with what they are compared with, so that
//! both see the same machine.

mod attention;
mod ops;
mod peer;
mod production;

use std::time::{Duration, Instant};

pub use ops::run;

/// Measured runs of a line.
const RUNS: usize = 7;
/// Runs that do not count.
const WARM_UP: usize = 2;

/// The median time of each of these, run in turns.
fn medians<E>(work: &mut [&mut dyn FnMut() -> Result<(), E>]) -> Result<Vec<Duration>, E> {
    let mut times = vec![Vec::with_capacity(RUNS); work.len()];
    for round in 0..WARM_UP + RUNS {
        for (work, times) in work.iter_mut().zip(&mut times) {
            let started = Instant::now();
            work()?;
            if round >= WARM_UP {
                times.push(started.elapsed());
            }
        }
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort();
        times[RUNS / 2]
    };
    Ok(times.iter_mut().map(median).collect())
}
