//! The program `dropless`.

use std::process::ExitCode;

fn main() -> ExitCode {
    dropless::cli::run(std::env::args_os())
}
