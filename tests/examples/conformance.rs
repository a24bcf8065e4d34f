//! Writes the recording of conformance to a directory: `cargo run -p dropless-tests --example conformance -- DIR`.
#![expect(clippy::unwrap_used, reason = "an example that cannot go on should stop")]

use std::path::PathBuf;

use dropless_tests::conformance;

/// Problems of each kind.
const EACH: usize = 4;

fn main() {
    let dir = PathBuf::from(std::env::args_os().nth(1).expect("the directory of the recording"));
    let recording = conformance::record(EACH, |_| true).unwrap();
    let bytes = recording.write(&dir).unwrap();
    let header = &recording.header;
    println!(
        "{}: {} ops, {} pipelines, {bytes} bytes, digest {}",
        dir.display(),
        header.ops,
        header.pipelines,
        header.digest
    );
}
