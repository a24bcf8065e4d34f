//! `dropless doctor`: what this machine and this program offer.

use std::fmt::Write;

use dropless_core::host::Simd;

/// One line for each backend.
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
    let _ = writeln!(out, "host  available: {threads} threads; {}", simd.join(", "));
    let _ = writeln!(out, "wgpu  not in this version: its crate is not written yet");
    let _ = writeln!(out, "cuda  not in this version: its crate is not written yet");
    out
}
